"""``hushgrad serve`` as a command: addresses, mistakes, warnings; and its pages and API where all is well."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import HANGS

pytest.importorskip("fastapi", reason="the web page needs hushgrad[serve]")
from fastapi.testclient import TestClient

from hushgrad.cli.main import main
from hushgrad.report.charts import Chart, bar, number, smoothed
from hushgrad.serve import Settings, app, create_app, fields
from hushgrad.serve.rules import Rules
from hushgrad.serve.runs import Shelf

HOME = "http://localhost:8642"


def run_folder(root: Path, name: str, lines: list[dict[str, object]], **tables: object) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(tables))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["serve", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err
    return err


def test_mistakes_are_one_sentence_with_the_remedy(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"Port {port} is in use. Choose another one with --port" in refused(capsys, "--port", str(port))
    assert "to be a folder" in refused(capsys, str(tmp_path / "missing"))
    (tmp_path / "file").write_text("")
    assert "to be a folder" in refused(capsys, str(tmp_path / "file"))
    assert "0..65535" in refused(capsys, "--port", "70000")
    assert "Did you mean --ledger?" in refused(capsys, "--leger", "x")
    assert "--host" in refused(capsys, "--host", "not a name")


def test_an_address_that_is_not_ours_is_refused_after_a_warning(capsys, monkeypatch):
    def nobody(*_: object, **__: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    assert main(["serve", "--host", "192.0.2.7", "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert (
        err.startswith("Warning: at 192.0.2.7 the page can be reached from the network") and "Cannot listen at 192.0.2.7" in err
    )


def test_a_missing_extra_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'hushgrad[serve]'" in refused(capsys)


def test_help_imports_nothing_heavy_and_has_an_example(capsys):
    text = subprocess.run([sys.executable, "-m", "hushgrad.cli.main", "serve", "--help"], capture_output=True, text=True).stdout
    assert "example:\n  hushgrad serve runs" in text and "--json" in text
    heavy = "import sys; from hushgrad.cli import serve; serve._parser(); print({'torch', 'fastapi', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout == "set()\n"


def test_addresses_are_such_that_a_browser_can_open_them():
    assert app.address(Settings(), 8642) == "http://127.0.0.1:8642/"
    assert app.address(Settings(host="::1"), 1) == "http://[::1]:1/"
    everywhere = Settings(host="0.0.0.0")
    assert app.address(everywhere, 1) == f"http://127.0.0.1:1/?token={everywhere.token}"
    assert Settings(host="localhost").is_loopback and not Settings(host="example.org").is_loopback
    assert Settings().token == "" and Settings(token="t").token == "t"
    assert Settings(host="0.0.0.0").token != Settings(host="0.0.0.0").token


def test_states_of_runs(tmp_path):
    lines = [{"step": k, "steps": 50, "epsilon": k / 10, "test_loss": 2.0 / k, "raw_loss": 9.9} for k in range(1, 21)]
    run_folder(tmp_path, "a", lines, plan={"epsilon": 3.0, "delta": 1e-5}, model={"name": "cnn"}, run={"seed": 4})
    run_folder(tmp_path, "below/deeper/b", [])
    run_folder(tmp_path, "below/deeper/too/deep/c", [])
    shelf = Shelf(tmp_path, raw=False, rules=Rules(None))
    runs = {run.name: run for run in shelf.all()[0]}
    assert set(runs) == {"a", "below/deeper/b"}
    a = runs["a"]
    assert (a.state, a.epsilon, a.budget, a.delta, a.model, a.seeded) == ("running", 2.0, 3.0, 1e-5, "cnn", True)
    assert a.series.has_raw and a.result("test_loss") == 0.1 and a.is_live
    assert runs["below/deeper/b"].state == "starting"
    (tmp_path / "a" / "guarantee.json").write_text(json.dumps({"epsilon": {"float": "inf"}, "delta": 1e-5}))
    assert shelf.get("a").state == "unreadable"  # a claim without a plan and a ledger is none
    for name in ("plan.json", "ledger.json"):
        (tmp_path / "a" / name).write_text("{}")
    finished = shelf.get("a")
    assert finished.check == "not verified"  # what the files say, until a card has been made of them
    shelf.note(finished, "verified")
    assert shelf.get("a").to_json()["check"] == "verified"
    (tmp_path / "a" / "guarantee.json").write_text(json.dumps({"epsilon": {"float": "inf"}, "delta": 1e-6}))
    assert shelf.get("a").check == "not verified"  # other files, another claim
    finished = shelf.get("a")
    assert finished.state == "finished" and finished.to_json()["epsilon"] == "inf" and not finished.is_live
    assert json.dumps(finished.to_json(), allow_nan=False)


def test_a_quiet_run_is_called_silent(tmp_path):
    import os

    folder = run_folder(tmp_path, "a", [{"step": 1, "steps": 9, "epsilon": 0.5}])
    for file in folder.iterdir():
        os.utime(file, (1e9, 1e9))
    assert Shelf(tmp_path, raw=False, rules=Rules(None)).get("a").state == "silent"


def test_pages_and_descriptions(tmp_path):
    run_folder(tmp_path, "a run & more", [{"step": k, "steps": 9, "epsilon": 0.5 + k} for k in range(3)])
    with TestClient(create_app(Settings(runs=tmp_path)), base_url=HOME) as client:
        page = client.get("/runs").text
        assert "a run &amp; more" in page and 'href="/runs/a%20run%20%26%20more"' in page
        part = client.get("/part/runs/a%20run%20%26%20more")
        assert "data-more" in part.text and part.headers["etag"]
        unchanged = client.get("/part/runs/a%20run%20%26%20more", headers={"If-None-Match": part.headers["etag"]})
        assert unchanged.status_code == 304 and not unchanged.content
        described = client.get("/api/openapi.json").json()
        assert set(described["paths"]) == {
            "/api/health",
            "/api/plan",
            "/api/curves",
            "/api/runs",
            "/api/runs/{name}",
            "/api/cards/{name}",
            "/api/ledger",
            "/api/policy",
        }
        assert all(set(methods) == {"get"} for methods in described["paths"].values())
        assert {p["name"] for p in described["paths"]["/api/plan"]["get"]["parameters"]} == {*fields.NUMBERS, *fields.CHOICES}
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert client.get(path).status_code == 404
        assert client.get("/ledger").status_code == 200 and client.get("/api/ledger").status_code == 404
        assert client.get("/cards/a%20run%20%26%20more").status_code == 404  # not finished
        assert client.head("/runs").status_code == 200
    with TestClient(create_app(Settings()), base_url=HOME) as client:
        assert "No folder of runs was given" in client.get("/runs").text
        assert client.get("/").status_code == 200


def test_every_default_of_the_form_is_within_its_bounds():
    question = fields.asked([])
    for name, field in fields.NUMBERS.items():
        assert field.low <= field.slider[0] <= question[name] <= field.slider[1] <= field.high
    assert fields.asked([(name, "") for name in fields.NUMBERS]) == question


def test_the_answer_is_the_planners():
    from hushgrad.planner import compare
    from hushgrad.serve import jobs

    question = fields.asked([("epsilon", "0.5"), ("dataset_size", "2000"), ("batch_size", "100"), ("epochs", "5")])
    found = jobs.plan(question=question)
    known = compare(epsilon=0.5, delta=1e-6, dataset_size=2000, batch_size=100, epochs=5, parameters=10**6)
    assert [one["name"] for one in found["candidates"]] == [one.name for one in known]
    assert found["candidates"][0]["noise_multiplier"] == known[0].noise_multiplier
    best = found["candidates"][0]
    curves = jobs.curves(question=question, name=best["name"], noise_multiplier=best["noise_multiplier"])
    assert curves["steps"][-1][1] == pytest.approx(0.5, rel=1e-3)
    for name, falls in (("noise", True), ("steps", False), ("batch", False)):
        values = [epsilon for _, epsilon in curves[name]]
        assert values == sorted(values, reverse=falls) and len(values) > 3
    assert "One more epoch" in curves["one_more_epoch"]


def test_charts_stay_inside_their_frame():
    import re

    for log in (False, True):
        for points in ([(1, 2.0), (50, 1.0), (1000, 0.25)], [(1, 1.0), (2, 1.0)], [(3, 5.0)], [(1e-9, 1e9), (1e9, 1e-9)]):
            text = Chart(
                title="", words="a <b>", x="x", y="y", points=points, mark=points[0], limit=1.5, log_x=log, log_y=log
            ).svg()
            assert "a &lt;b&gt;" in text and "nan" not in text and "style=" not in text
            for x, y in re.findall(r'(?:cx|x1)="([-\d.]+)" (?:cy|x2)="([-\d.]+)"', text):
                assert 0 <= float(x) <= 360 and 0 <= float(y) <= 360
    assert 'width="200.0"' in bar(7.0, words="") and "over" in bar(7.0, words="")
    assert [number(x) for x in (None, float("nan"), 0, 1234.5, 1.5e-9)] == ["–", "–", "0", "1,234", "1.5·10⁻⁹"]
    assert len(smoothed([(k, 1.0) for k in range(1000)])) <= 50


GARBAGE = [
    b"",
    b"\x00" * 4096,
    b"GET\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET http://elsewhere.example/ HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: elsewhere.example\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%00%ff%fe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /runs/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\nx",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nffffffff\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,  # somebody speaks TLS
]


def spoken(port: int, words: bytes, *, patience: float) -> bytes:
    """What is answered to these bytes, until the server hangs up or ``patience`` seconds have passed."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=HANGS) as line, contextlib.suppress(OSError):
        line.settimeout(patience)
        line.sendall(words)
        while len(found) < 1 << 16 and (chunk := line.recv(1 << 14)):
            found += chunk
    return found


def test_a_server_survives_garbage_and_ends_with_ctrl_c(tmp_path):
    words = [sys.executable, "-m", "hushgrad.cli.main", "serve", str(tmp_path), "--port", "0", "--json"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        text = ""
        while not text.endswith("}\n"):
            text += server.stdout.readline()
        port = int(json.loads(text)["address"].rstrip("/").rsplit(":", 1)[1])
        with ThreadPoolExecutor(len(GARBAGE)) as visitors:  # all at once: many of them wait in vain
            answers = list(visitors.map(lambda garbage: spoken(port, garbage, patience=2.0), GARBAGE))
        for garbage, answer in zip(GARBAGE, answers, strict=True):
            assert b"root:" not in answer and b"Traceback" not in answer
            assert not answer or answer.split(b" ")[1][:1] == b"4", garbage[:60]
        health = b"GET /api/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert b'"ok":true' in spoken(port, health, patience=HANGS)
    finally:
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=HANGS)
    assert (server.returncode, out, err) == (0, "", "Ended.\n")


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    """Port and token of a server, in a process of its own."""
    folder = str(tmp_path_factory.mktemp("runs"))
    words = [sys.executable, "-m", "hushgrad.cli.main", "serve", folder, "--port", "0", "--json", "--token"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        text = ""
        while not text.endswith("}\n"):
            text += server.stdout.readline()
        address, _, token = json.loads(text)["address"].partition("/?token=")
        yield int(address.rsplit(":", 1)[1]), token
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=HANGS)


@pytest.mark.parametrize("kind", ["half a head", "half a second head", "refused and waiting", "nothing"])
def test_who_sends_no_whole_request_keeps_nobody_out(locked, kind):
    """Many connections that wait; a visitor with the token is answered at once, again and again."""
    port, token = locked
    half, whole = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    sent = {"half a head": half, "half a second head": whole + half, "refused and waiting": whole, "nothing": b""}[kind]
    asked = f"GET /api/health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    with contextlib.ExitStack() as lines:
        for _ in range(3):
            for _ in range(70):
                line = lines.enter_context(socket.create_connection(("127.0.0.1", port), timeout=HANGS))
                line.sendall(sent)
            for _ in range(5):
                assert b'"ok":true' in spoken(port, asked.encode(), patience=HANGS)


def test_half_a_request_has_a_deadline():
    import asyncio

    from hushgrad.serve.connections import waiting_room

    async def story(deadline):
        import uvicorn

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"yes"})

        options = {"http": waiting_room(deadline=deadline, waiting=4, share=2), "ws": "none", "lifespan": "off"}
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", **options))
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        first, second, third = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in (second, third):
            writer.write(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(
            ConnectionError
        ):  # the oldest beyond the share, long before the deadline; or all at the deadline
            assert await asyncio.wait_for(first[0].read(), HANGS) == b""
        if deadline > HANGS:
            third[1].write(b"Host: a\r\n\r\n")
            assert b"yes" in await asyncio.wait_for(third[0].readuntil(b"yes\r\n"), HANGS)  # who goes on is answered
        else:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(second[0].read(), HANGS) == b""
        for _, writer in (first, second, third):
            writer.close()
        server.should_exit = True
        await asyncio.wait_for(serving, HANGS)

    for deadline in (0.5, 10 * HANGS):
        asyncio.run(story(deadline))
