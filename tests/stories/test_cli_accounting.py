"""The command line as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANGS

from hushgrad.cli.main import main
from hushgrad.events import Event, Gaussian, PureDP
from hushgrad.guarantee import Ledger
from hushgrad.train.plan import Plan


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_epsilon_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "epsilon", "--noise-multiplier", "1", "--delta", "1e-5", "--accountant", "gdp,rdp,zcdp")
    assert code == 0
    assert "gdp         4.37718" in out and "rdp" in out and "Gaussian(1), delta = 1e-05" in out


def test_a_file_may_hold_an_event_a_plan_or_the_ledger_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    event, ledger = Gaussian(2.0).sampled(rate=0.5) * 3, Ledger()
    ledger.record(Gaussian(2.0).sampled(rate=0.5), times=3)
    plan = Plan.dpsgd(noise_multiplier=2.0, delta=1e-5, batch_size=5, dataset_size=10, steps=3)
    told = set()
    for content in (event, ledger, plan):
        (tmp_path / "file.json").write_text(json.dumps(content.to_json()))
        for words in (["--from", str(tmp_path / "file.json")], ["--event", f"@{tmp_path / 'file.json'}"]):
            code, out, _ = run(capsys, "epsilon", "--delta", "1e-5", *words)
            told.add((code, out))
    assert len(told) == 1 and next(iter(told))[0] == 0, told


def test_epsilon_json_and_event_tree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    event = Gaussian(2.0).sampled(rate=0.1) * 10 + PureDP(0.1)
    text = json.dumps(event.to_json())
    (tmp_path / "event.json").write_text(text)
    for word in (text, f"@{tmp_path}/event.json"):
        code, out, _ = run(capsys, "epsilon", "--event", word, "--delta", "1e-6", "--accountant", "rdp,gdp", "--json")
        answer = json.loads(out)
        assert code == 0 and Event.from_json(answer["event"]) == event
        assert answer["answers"][0]["epsilon"] > 0.1
        assert "refused" in answer["answers"][1]


def test_infinite_epsilon_is_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "epsilon", "--event", '{"event": "NonPrivate"}', "--delta", "1e-6", "--accountant", "rdp", "--json")
    assert json.loads(out)["answers"][0]["epsilon"] == "inf"


def test_attack_and_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curve.png"
    question = ("epsilon", "--noise-multiplier", "1", "--delta", "1e-5", "--accountant", "gdp,zcdp")
    code, out, _ = run(capsys, *question, "--attack", "--plot", str(path))
    assert code == 0 and "right at most 69.15%" in out
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_calibrate_every_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    budget = ("--epsilon", "1", "--delta", "1e-6", "--json", "--accountant")

    def value(*words: str) -> float:
        code, out, err = run(capsys, "calibrate", *words)
        assert code == 0, err
        return float(json.loads(out)["answers"][0]["value"])

    assert value(*budget, "gdp", "--steps", "1000") == pytest.approx(133.596, rel=1e-4)
    assert value(*budget, "gdp", "--for", "steps", "--noise-multiplier", "100") == 560
    rate = value(*budget, "rdp", "--for", "rate", "--noise-multiplier", "1.5", "--steps", "100")
    size = value(*budget, "rdp", "--for", "batch", "--noise-multiplier", "1.5", "--steps", "100", "--dataset-size", "5000")
    assert size == int(rate * 5000)


def test_printed_noise_meets_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "calibrate", "--epsilon", "1", "--delta", "1e-6", "--steps", "77", "--accountant", "gdp")
    noise = out.split()[-1]
    _, out, _ = run(
        capsys, "epsilon", "--noise-multiplier", noise, "--steps", "77", "--delta", "1e-6", "--accountant", "gdp", "--json"
    )
    assert json.loads(out)["answers"][0]["epsilon"] <= 1.0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["epsilom"], "No such command: epsilom. Did you mean epsilon?"),
        (["epsilon", "--noize-multiplier", "1"], "Did you mean --noise-multiplier?"),
        (["epsilon", "--noise-multiplier", "1"], "--delta"),
        (["epsilon", "--noise-multiplier", "x", "--delta", "1e-5"], "expected a number such as 8 or 1e-5, got 'x'"),
        (["epsilon", "--noise-multiplier", "-1", "--delta", "1e-5"], "noise_multiplier=-1.0"),
        (["epsilon", "--delta", "1e-5"], "Give --noise-multiplier"),
        (["epsilon", "--noise-multiplier", "1", "--delta", "2", "--accountant", "gdp"], "Expected delta=2.0"),
        (["epsilon", "--noise-multiplier", "1", "--delta", "1e-5", "--accountant", "rpd"], "Did you mean 'rdp'?"),
        (["epsilon", "--noise-multiplier", "1", "--delta", "1e-5", "--accountant", "gdp", "--relation", "remove"], "relation"),
        (["epsilon", "--noise-multiplier", "0", "--delta", "1e-5", "--plot", "curve.png"], "There is no curve to plot"),
        (["epsilon", "--event", "{", "--delta", "1e-5"], "Expected JSON text"),
        (["epsilon", "--event", "@/no/such/file", "--delta", "1e-5"], "Cannot read the event"),
        (["epsilon", "--event", '{"event": "Gausian"}', "--delta", "1e-5"], "Did you mean 'Gaussian'?"),
        (["calibrate", "--epsilon", "1", "--delta", "1e-5", "--noise-multiplier", "1"], "Leave it out"),
        (["calibrate", "--epsilon", "1", "--delta", "1e-5", "--for", "batch", "--noise-multiplier", "1"], "--dataset-size"),
        (["calibrate", "--epsilon", "1", "--delta", "1e-5", "--for", "epochs"], "invalid choice: 'epochs'"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str], words: list[str], sentence: str) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2 and out == ""
    assert sentence in err and err.startswith("hushgrad: ") and err.count("\n") == 1


def test_an_answer_that_no_accountant_has_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "epsilon", "--noise-multiplier", "1", "--rate", "0.1", "--delta", "1e-5", "--accountant", "gdp")
    assert code == 2 and "guess" in out


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hushgrad", "epsilonn"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Did you mean epsilon?" in done.stderr


def test_overview_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--help")[1].count("hushgrad") >= 2
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.startswith("hushgrad 0.")
    assert run(capsys)[0] == 0


@pytest.mark.parametrize("command", ["epsilon", "calibrate"])
def test_help_is_light(command: str) -> None:
    """Without numpy, scipy or torch, with a tenth of the modules that these are, and with an example."""
    script = (
        "import sys\nfrom hushgrad.cli.main import main\n"
        f"try: main(['{command}', '--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "assert not {'numpy', 'scipy', 'torch'} & set(sys.modules) and len(sys.modules) < 250, len(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "example:\n  hushgrad " + command in done.stdout


# Where the answer goes -----------------------------------------------------------------------------------------------

_QUESTION = ["epsilon", "--noise-multiplier", "1", "--steps", "10", "--delta", "1e-5"]


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("words", [_QUESTION, ["--help"], ["epsilon", "--help"]])
def test_a_reader_that_has_gone_is_no_error(words, buffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hushgrad", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, timeout=HANGS)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_behind_the_output_is_one_sentence():
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "hushgrad", *_QUESTION]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=HANGS)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "No space left" in done.stderr


def test_a_name_that_the_terminal_cannot_show_is_written_in_ascii(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ledger = str(tmp_path / "budget.db")
    for words in (["init", ledger], ["add", ledger, "données", "--epsilon", "1", "--delta", "1e-6"], ["status", ledger]):
        command = [sys.executable, "-X", "utf8", "-m", "hushgrad", "ledger", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANGS)
        assert (done.returncode, done.stderr) == (0, "")
    assert r"donn\xe9es: epsilon 0 of 1" in done.stdout


def test_a_whole_number_may_be_written_as_6e4_in_every_command(capsys):
    question = ["epsilon", "--noise-multiplier", "1.1", "--rate", "0.01", "--delta", "1e-5", "--steps"]
    assert main([*question, "1000"]) == 0
    first = capsys.readouterr().out
    assert main([*question, "1e3"]) == 0
    assert capsys.readouterr().out == first
    for wrong in ("1%", "1.5", "1e-1", "1,000", "inf", "nan"):
        assert main([*question, wrong]) == 2
        assert "expected a whole number such as 60000 or 6e4" in capsys.readouterr().err
