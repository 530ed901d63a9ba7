"""The web page against hostile requests and hostile run folders: one clear sentence, no hang, no escape, no secret."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote, unquote

import pytest
from patience import HANGS

pytest.importorskip("fastapi", reason="the web page needs hushgrad[serve]")
from fastapi.testclient import TestClient

from hushgrad.errors import ArgumentError
from hushgrad.recipes import Recipe, train
from hushgrad.serve import Settings, create_app
from hushgrad.serve.access_control import POLICY, AccessControl
from hushgrad.serve.files import LIMITS, RunFolder, Unreadable
from hushgrad.serve.worker_queue import WorkerQueue

HOME = "http://127.0.0.1:8642"
SECRET = secrets.token_hex(32)
TABLES = {
    "model": {"name": "logistic"},
    "data": {"name": "digits"},
    "plan": {"noise_multiplier": 2.0, "delta": 1e-4, "batch_size": 128, "steps": 8},
    "run": {"evaluate_every": 4, "raw_metrics": True, "threads": 1, "seed": 271828182},
}


def plant_keys(folder: Path) -> None:
    """Secrets wherever a run, or a careless user, might leave one."""
    (folder / "checkpoint").mkdir(exist_ok=True)
    for name in ("key", "run.key", ".key", "key.json", "checkpoint/key", "checkpoint/state.safetensors", "checkpoint/state.json"):
        (folder / name).write_text(json.dumps({"key": SECRET}))


def hostile_folders(root: Path, outside: Path) -> None:
    """Run folders that nobody should trust, each with its own trick."""

    def folder(name: str) -> Path:
        (root / name).mkdir()
        (root / name / "recipe.json").write_text("{}")
        plant_keys(root / name)
        return root / name

    (folder("truncated") / "recipe.json").write_text('{"plan": {"epsilon": 3')
    (folder("nested") / "recipe.json").write_text("[" * 200_000)
    (folder("nan") / "metrics.jsonl").write_text('{"step": NaN, "epsilon": NaN}\n{"step": 1, "epsilon": Infinity, "steps": -5}\n')
    (folder("digits") / "guarantee.json").write_text('{"epsilon": ' + "9" * 5000 + "}")
    (folder("wrong types") / "recipe.json").write_text('{"plan": [1], "model": {"name": 7}, "data": 3, "run": null}')
    (folder("<script>alert(1)<script>") / "metrics.jsonl").write_text('{"step": 1, "steps": 2, "epsilon": 0.5}\n')
    with (folder("sparse") / "guarantee.json").open("wb") as file:
        file.truncate(1 << 30)
    with (root / "sparse" / "metrics.jsonl").open("wb") as file:
        file.truncate(1 << 30)
    os.mkfifo(folder("pipe") / "metrics.jsonl")
    os.mkfifo(root / "pipe" / "guarantee.json")
    outside.write_text(json.dumps({"plan": {"epsilon": 1.0}, "model": {"name": SECRET}, "note": SECRET}))
    (folder("link") / "recipe.json").unlink()
    (root / "link" / "recipe.json").symlink_to(outside)
    (root / "link" / "plan.json").write_text("{}")
    (root / "linked folder").symlink_to(root.parent)
    quoting = folder("key in a plan")
    for name in ("plan.json", "ledger.json", "report.json", "guarantee.json"):
        (quoting / name).write_text(json.dumps({"epsilon": 1.0, "delta": 1e-5, "noise_multiplier": SECRET, "event": SECRET}))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("served")
    root = base / "runs"
    root.mkdir()
    train(Recipe.from_tables(TABLES), root / "good", progress=False)
    plant_keys(root / "good")
    hostile_folders(root, base / "outside.json")
    (base / "elsewhere").mkdir()
    (base / "elsewhere" / "recipe.json").write_text(json.dumps({"model": {"name": SECRET}}))
    return root


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[TestClient]:
    with TestClient(create_app(Settings(runs=root)), base_url=HOME, follow_redirects=False) as client:
        yield client


def test_every_answer_carries_the_headers_and_allows_nobody_else(client):
    for path in ("/", "/runs", "/api/runs", "/static/site.js", "/nowhere", "/api/nowhere", "/?epsilon=-1"):
        headers = client.get(path, headers={"Origin": "https://elsewhere.example"}).headers
        assert headers["content-security-policy"] == POLICY
        assert "unsafe" not in POLICY and "http" not in POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] in ("no-store", "no-cache")
        assert not [name for name in headers if name.startswith("access-control")]
        assert "server" not in headers


def test_a_defect_is_a_sentence_with_the_same_headers(root, monkeypatch):
    with TestClient(create_app(Settings(runs=root)), base_url=HOME, raise_server_exceptions=False) as client:
        monkeypatch.setattr(client.app.state.services.shelf, "all", lambda: {}["a defect"])
        for path in ("/runs", "/api/runs"):
            answer = client.get(path)
            assert answer.status_code == 500 and "a defect" not in answer.text and "Traceback" not in answer.text
            assert answer.headers["content-security-policy"] == POLICY and answer.headers["x-frame-options"] == "DENY"


def test_the_page_needs_no_inline_script_style_or_handler(client):
    for path in ("/?epsilon=2", "/runs", "/runs/good", "/cards", "/ledger", "/nowhere"):
        text = client.get(path).text
        assert not re.search(r"<script(?![^>]*src=)|\son\w+\s*=|\sstyle\s*=|<style|javascript:|https?://", text), path


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_nothing_can_be_changed(client, method):
    for path in ("/", "/runs", "/api/plan", "/api/runs/good"):
        answer = client.request(method, path, content=b"x" * 10)
        assert answer.status_code == 405 and answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "host", ["elsewhere.example", "127.0.0.1.elsewhere.example", "localhost:80:80", "", "[::2]", "0.0.0.0", "a" * 300]
)
def test_a_bent_name_is_refused(client, host):
    assert client.get("/api/runs", headers={"Host": host}).status_code == 400


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:8642", "[::1]:8642", "LOCALHOST"])
def test_own_names_are_answered(client, host):
    assert client.get("/api/health", headers={"Host": host}).status_code == 200


def test_without_the_check_a_bent_name_would_pass(root, monkeypatch):
    monkeypatch.setattr(AccessControl, "_is_ours", lambda self, host: True)
    with TestClient(create_app(Settings(runs=root)), base_url=HOME) as careless:
        assert careless.get("/api/runs", headers={"Host": "elsewhere.example"}).status_code == 200


def test_other_sites_may_link_and_not_use(client):
    used = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    assert client.get("/api/runs", headers=used).status_code == 403
    assert client.get("/runs", headers={**used, "Sec-Fetch-Site": "same-site"}).status_code == 403
    assert client.get("/runs", headers={**used, "Sec-Fetch-Dest": "iframe", "Sec-Fetch-Mode": "navigate"}).status_code == 403
    assert client.get("/runs", headers={**used, "Sec-Fetch-Dest": "document", "Sec-Fetch-Mode": "navigate"}).status_code == 200


ESCAPES = [
    "..",
    "../elsewhere",
    "..%2felsewhere",
    "%2e%2e/elsewhere",
    "%2e%2e%2felsewhere",
    "..%5celsewhere",
    "good/../../elsewhere",
    "good/checkpoint",
    "good/key",
    "good/checkpoint/key",
    "good/plan.json",
    "good%00",
    "good%00.json",
    "%2Fetc%2Fpasswd",
    "/etc/passwd",
    "//etc/passwd",
    "linked%20folder/elsewhere",
    "linked%20folder",
    "./good",
    "good/",
    "good/.",
    "%c0%ae%c0%ae/elsewhere",
    "%ff%fe",
    "..;/elsewhere",
    "x" * 1500,
    "%25%32%65%25%32%65/elsewhere",
    "~",
    "good\u202e",
]


def raw(app: Any, path: str) -> tuple[int, str]:
    """Ask with a path exactly as given: clients tidy up dots and slashes before they send them."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(HANGS)  # the visitor stays
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    text = unquote(path, errors="surrogateescape")
    scope = {"type": "http", "method": "GET", "path": text, "raw_path": path.encode(), "query_string": b"", "scheme": "http"}
    scope |= {"headers": [(b"host", b"127.0.0.1")], "http_version": "1.1", "root_path": "", "server": ("127.0.0.1", 80)}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent).decode(errors="replace")


@pytest.mark.parametrize("name", ESCAPES)
def test_no_name_leads_out_of_the_folder(client, name):
    for place in (
        "/runs/",
        "/part/runs/",
        "/cards/",
        "/api/runs/",
        "/api/cards/",
        "/download/html/",
        "/download/md/",
        "/static/",
    ):
        status, text = raw(client.app, place + name)
        assert status in (404, 414), (place, name)
        assert SECRET not in text


def test_the_overlong_is_refused(client):
    assert client.get("/runs/" + "x" * 5000).status_code == 414
    assert client.get("/?epsilon=" + "1" * 5000).status_code == 414


@pytest.mark.parametrize(
    "query",
    [
        "epsilon=0",
        "epsilon=-1",
        "epsilon=nan",
        "epsilon=inf",
        "epsilon=1e400",
        "epsilon=abc",
        "epsilon=1&epsilon=2",
        "epsilon=" + "1" * 100,
        "delta=0",
        "delta=1",
        "dataset_size=1e30",
        "dataset_size=10.5",
        "dataset_size=1000000000&batch_size=1&epochs=10000",
        "batch_size=0",
        "batch_size=70000",
        "epochs=1e9",
        "parameters=0",
        "sampling=other",
        "relation=%00",
        "workload=x",
        "__class__=1",
        "epsilon=%3Cscript%3E",
        "\u0661=1",
    ],
)
def test_a_wrong_question_is_one_sentence(client, query, monkeypatch):
    monkeypatch.setattr(WorkerQueue, "ask", None)  # refused before any work
    answer = client.get(f"/api/plan?{query}")
    assert answer.status_code == 422 and answer.headers["content-type"] == "application/problem+json"
    assert set(answer.json()) == {"title", "status", "detail"} and answer.json()["detail"].startswith("Expected ")
    page = client.get(f"/?{query}")
    assert page.status_code == 422 and 'class="problem"' in page.text and "<script>" not in page.text


def test_broken_folders_are_listed_with_what_is_wrong(client):
    runs = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}  # nobody writes to the pipe: who reads it hangs
    for name, problem in {
        "truncated": "recipe.json is not JSON",
        "nested": "recipe.json is not JSON",
        "sparse": "larger than",
    }.items():
        assert runs[name]["state"] == "unreadable" and problem in runs[name]["problem"]
        assert runs[name]["check"] == "not verified", "whatever epsilon its files claim"
    assert runs["pipe"]["state"] == "starting"
    assert runs["digits"]["epsilon"] is None or runs["digits"]["epsilon"] == "inf"
    assert runs["nan"]["epsilon"] is None
    assert runs["wrong types"]["model"] == ""
    assert runs["link"]["model"] == "", "the linked file was not read"
    assert "linked folder" not in runs and not [name for name in runs if "elsewhere" in name]
    assert client.get("/runs").text.count("&lt;script&gt;") and "<script>alert" not in client.get("/runs").text
    for name in runs:
        for place in ("/runs/", "/part/runs/", "/api/runs/"):
            assert client.get(place + quote(name)).status_code == 200, (place, name)


def test_no_secret_is_in_any_answer(client, root):
    """Every route, every run, and the links on the pages: the planted key, its bytes and the seed are nowhere."""
    names = [run["name"] for run in client.get("/api/runs").json()["runs"]]
    waiting = ["/", "/?epsilon=2", "/runs", "/cards", "/ledger", "/api/runs", "/api/ledger", "/api/openapi.json", "/favicon.ico"]
    places = ("/runs/", "/part/runs/", "/cards/", "/api/runs/", "/api/cards/", "/download/html/", "/download/md/")
    waiting += [place + quote(name) for place in places for name in names]
    files = [*LIMITS, "key", "checkpoint/key", "model.safetensors"]
    waiting += [f"{place}good/{file}" for place in (*places, "/static/", "/") for file in files]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        answer = client.get(path)
        for secret in (SECRET, SECRET.upper(), "271828182"):
            assert secret not in answer.text and secret not in str(answer.headers), path
        if answer.headers["content-type"].startswith("text/html"):
            waiting += [link.replace("&amp;", "&").split("#")[0] for link in re.findall(r'href="(/[^"?]*)"', answer.text)]
    assert {"/cards/good", "/download/md/good", "/api/cards/good"} <= seen and len(seen) > 100
    assert client.get("/cards/good").status_code == 200
    assert client.get(f"/cards/{quote('key in a plan')}").status_code == 422


def test_a_card_carries_no_script_and_may_load_nothing(client):
    answer = client.get("/cards/good")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src" not in policy
    assert "<script" not in answer.text and "raw_" not in client.get("/download/md/good").text.split("What the guarantee")[0]
    assert client.get("/download/html/good").headers["content-disposition"].startswith("attachment")


def test_raw_metrics_are_hidden_unless_asked_for(client, root):
    shown = client.get("/api/runs/good").json()
    assert shown["raw_metrics_hidden"] and not [name for name in shown["series"] if name.startswith("raw_")]
    with TestClient(create_app(Settings(runs=root, raw=True)), base_url=HOME) as open_client:
        assert "raw_loss" in open_client.get("/api/runs/good").json()["series"]
        assert "un-noised" in open_client.get("/runs/good").text


def test_a_link_made_at_the_last_moment_is_not_followed(tmp_path, monkeypatch):
    """The scan saw a folder; by the time of reading it is a link to elsewhere."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "recipe.json").write_text("{}")
    folder = RunFolder(tmp_path, ("a",))
    assert folder.object("recipe.json") == {}
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    with pytest.raises(Unreadable):
        folder.object("recipe.json")
    with monkeypatch.context() as careless:  # without the flag the attack succeeds, so the test above can fail
        careless.setattr("hushgrad.serve.files._FLAGS", os.O_RDONLY)
        assert folder.object("recipe.json") == {}
    for name in ("key", "../runs/good/plan.json", "checkpoint/key", "/etc/passwd", ""):
        with pytest.raises(Unreadable, match="not among the files"):
            RunFolder(tmp_path, ("b",)).text(name)


def test_of_large_metrics_few_lines_are_parsed(tmp_path):
    from hushgrad.serve.runs import read_series

    (tmp_path / "run").mkdir()
    line = '{"step": %d, "steps": 400000, "epsilon": 1.5, "signal_to_noise": 0.25, "learning_rate": 0.1}\n'
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(line % step for step in range(1, 300_001)) + '{"step": 300001, "eps')
    with mock.patch.object(json, "loads", wraps=json.loads) as parsed:
        series = read_series(RunFolder(tmp_path, ("run",)), raw=False)
    assert 200 <= parsed.call_count <= 1000
    assert series.step == 300_000 and series.steps == 400_000
    steps = [step for step, _ in series.curves["epsilon"]]
    assert 200 <= len(steps) <= 500 and steps[0] == 1 and steps == sorted(steps)


def test_the_token_is_asked_for(root):
    settings = Settings(runs=root, host="192.0.2.7")
    assert settings.token and settings.token not in repr(settings)
    with TestClient(create_app(settings), base_url="http://192.0.2.7:8642", follow_redirects=False) as client:
        for path in ("/", "/api/runs", "/static/site.css", "/?token=wrong", "/?token=", "/runs?token=" + settings.token[:-1]):
            assert client.get(path).status_code == 401
        for value in ("", "Bearer", "Bearer ", "Bearer wrong", "Basic " + settings.token):
            assert client.get("/api/runs", headers={"Authorization": value}).status_code == 401
        assert client.get("/api/runs", headers={"Authorization": f"Bearer {settings.token}"}).status_code == 200
        led = client.get(f"//elsewhere.example/?token={settings.token}")
        assert led.status_code in (303, 400) and not led.headers.get("location", "/x").startswith("//")
        client.cookies.clear()
        entered = client.get(f"/runs?token={settings.token}")
        assert entered.status_code == 303 and entered.headers["location"] == "/runs"
        assert {"HttpOnly", "SameSite=Strict"} <= {part.strip() for part in entered.headers["set-cookie"].split(";")}
        assert client.get("/runs").status_code == 200  # by the cookie


def test_a_password_in_the_ledger_url_is_not_shown(client):
    from hushgrad.serve import jobs

    url = "postgresql://me:very-secret-word@127.0.0.1:1/budget"
    assert "very-secret-word" not in repr(Settings(ledger=url))
    with pytest.raises(ArgumentError) as refusal:
        jobs.ledger(place=url)
    assert "very-secret-word" not in str(refusal.value)


def test_a_question_that_takes_too_long_loses_its_process_and_the_page_goes_on(monkeypatch):
    from hushgrad.serve.worker_queue import Busy, TooLong, WorkerQueue

    async def story() -> None:
        lane = WorkerQueue(seconds=0.05)
        monkeypatch.setattr("hushgrad.serve.worker_queue.COMMAND", ("cat", "/dev/zero"))
        monkeypatch.setattr("hushgrad.serve.worker_queue._LARGEST", 1 << 20)
        with pytest.raises(TooLong, match="too much memory"):  # an answer without end
            await lane.ask("plan", question={})
        monkeypatch.setattr("hushgrad.serve.worker_queue.COMMAND", ("sleep", f"{HANGS}"))
        monkeypatch.setattr("hushgrad.serve.worker_queue._START", 0.0)
        with pytest.raises(TooLong, match=r"No answer within 0\.2 seconds"):
            await lane.ask("plan", question={})
        waiting = [asyncio.ensure_future(lane.ask("plan", question={"n": n})) for n in range(12)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(result) for result in results} == {TooLong, Busy}
        lane.stop()

    threads = threading.active_count()
    asyncio.run(story())
    assert threading.active_count() <= threads + 1


def test_a_server_that_ends_does_not_wait_for_an_answer(monkeypatch):
    """A pipe that is closed while a thread waits for it never wakes that thread."""
    from hushgrad.serve import worker_queue as room

    real, asked, waited = room._line, threading.Event(), threading.Event()

    def slow_to_wake(child, until):
        asked.set()
        waited.wait(HANGS)  # until after the child's end, as on a busy machine
        return real(child, until)

    async def story(begun: bool) -> None:
        lane = room.WorkerQueue(seconds=HANGS)
        question = asyncio.ensure_future(lane.ask("plan", question={}))
        if begun:
            await asyncio.to_thread(asked.wait, HANGS)
        else:
            await asyncio.sleep(0)  # it has its turn, but no child yet
        lane.stop()
        waited.set()
        with pytest.raises(room.TooLong):
            await question
        with pytest.raises(room.TooLong, match="The server ends"):  # and no new child is started
            await lane.ask("plan", question={"n": 1})
        assert lane._child is None

    monkeypatch.setattr(room, "COMMAND", ("sleep", f"{10 * HANGS}"))
    monkeypatch.setattr(room, "_line", slow_to_wake)
    for begun in (True, False):
        asked.clear()
        waited.clear()
        asyncio.run(story(begun))  # the lane would wait for much longer than a test may take


def test_work_is_limited_by_the_processor_not_by_the_clock(monkeypatch):
    """A child that works for ever is ended by its own timer; the sentence says so."""
    from hushgrad.serve.worker_queue import TooLong, WorkerQueue

    async def story() -> None:
        lane = WorkerQueue(seconds=0.3)
        endless = "import json, signal, sys\nlimit = json.loads(sys.stdin.readline())['seconds']\n"
        endless += "signal.setitimer(signal.ITIMER_PROF, limit)\nwhile True: pass"
        monkeypatch.setattr("hushgrad.serve.worker_queue.COMMAND", (sys.executable, "-c", endless))
        with pytest.raises(TooLong, match=r"0\.3 seconds of work"):
            await lane.ask("plan", question={})
        lane.stop()

    asyncio.run(story())


def test_an_abandoned_question_leaves_the_queue(monkeypatch):
    from hushgrad.serve.worker_queue import WorkerQueue

    async def story() -> list[str]:
        asked: list[str] = []
        lane, begun, cancelled = WorkerQueue(seconds=1), threading.Event(), threading.Event()

        def exchange(line: str) -> bytes:
            asked.append(json.loads(line)["arguments"]["name"])
            begun.set()
            assert cancelled.wait(HANGS)
            return b'{"answer": {}}'

        monkeypatch.setattr(lane, "_exchange", exchange)
        first = asyncio.ensure_future(lane.ask("plan", name="first"))
        assert await asyncio.to_thread(begun.wait, HANGS)
        outdated = asyncio.ensure_future(lane.ask("plan", name="outdated"))
        newest = asyncio.ensure_future(lane.ask("plan", name="newest"))
        await asyncio.sleep(0.01)
        outdated.cancel()
        first.cancel()  # it has begun: it is finished, and nobody else is let in meanwhile
        await asyncio.sleep(0.01)
        cancelled.set()
        await newest
        assert await lane.ask("plan", name="first") == {}
        return asked

    assert asyncio.run(story()) == ["first", "newest"]


def test_two_runs_are_compared_and_a_forged_one_is_not(client):
    same = client.get("/compare", params={"a": "good", "b": "good"})
    assert same.status_code == 200 and "the same." in same.text and same.headers["content-security-policy"] == POLICY
    for name in ("key in a plan", "sparse", "link", "nowhere", "../good", "<script>alert(1)<script>"):
        answer = client.get("/compare", params={"a": "good", "b": name})
        assert answer.status_code in (404, 422) and SECRET not in answer.text and "<script>alert" not in answer.text
    assert client.get("/compare").status_code == 200


def test_a_strange_budget_is_questioned_and_the_command_trains(client):
    page = client.get("/", params={"epsilon": "60", "delta": "0.1", "dataset_size": "200", "batch_size": "100", "epochs": "1"})
    assert page.status_code == 200 and "promises next to nothing" in page.text and "A delta of 0.1" in page.text
    assert "hushgrad train recipe.toml --plan plan.json" in page.text
