"""Whatever lies in a run folder or comes in a request: the page answers, in JSON that is JSON, and lets nobody else in."""

from __future__ import annotations

import json
import math
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="the web page needs hushgrad[serve]")
from fastapi.testclient import TestClient

from hushgrad.errors import ArgumentError
from hushgrad.report.charts import Chart, number
from hushgrad.serve import Settings, create_app, fields
from hushgrad.serve.access_control import AccessControl
from hushgrad.serve.files import LIMITS
from hushgrad.serve.runs import SHOWN

KEYS = st.sampled_from(
    ["plan", "model", "data", "run", "name", "epsilon", "delta", "seed", "outcome", "step", "steps", "float", *SHOWN]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([10**400, -1, 0, math.inf, "inf", "<script>"])
)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6), max_leaves=12)
CONTENTS = st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode())
LINES = st.lists(CONTENTS, max_size=6).map(lambda lines: b"\n".join(lines) + b"\n")
FILES = st.dictionaries(st.sampled_from(sorted(set(LIMITS) - {"metrics.jsonl"})), CONTENTS, max_size=5)
NAMES = st.sampled_from([*fields.NUMBERS, *fields.CHOICES, "x"])
HTTP = "http://localhost"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz")
    with TestClient(create_app(Settings(runs=root, raw=True)), base_url=HTTP) as client:
        client.root = root
        yield client


@given(files=FILES, lines=LINES)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_run_folder_can_be_shown(client, files, lines):
    folder = client.root / "run"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, content in {"recipe.json": b"{}", **files, "metrics.jsonl": lines}.items():
        (folder / name).write_bytes(content)
    client.app.state.services.shelf._scanned = -math.inf
    for path in ("/runs", "/runs/run", "/part/runs/run", "/cards"):
        answer = client.get(path)
        assert answer.status_code == 200 and "<script>" not in answer.text
    for path in ("/api/runs", "/api/runs/run"):
        json.loads(client.get(path).text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@given(st.lists(st.tuples(NAMES, st.text(max_size=40) | st.floats().map(str)), max_size=8))
@settings(max_examples=150, deadline=None)
def test_a_question_is_within_bounds_or_refused(pairs):
    try:
        found = fields.asked(pairs)
    except ArgumentError as refusal:
        assert str(refusal).startswith("Expected ") and len(str(refusal)) < 400
        return
    for name, field in fields.NUMBERS.items():
        assert field.low <= found[name] <= field.high and (not field.whole or isinstance(found[name], int))
    assert found["epochs"] * found["dataset_size"] / found["batch_size"] <= fields.STEPS


@given(st.text(string.printable, max_size=30) | st.from_regex(r"(localhost|127\.0\.0\.1|\[::1\])[:.@/\w]{0,10}", fullmatch=True))
def test_only_own_names_pass(host):
    shield = AccessControl(None, Settings())
    if shield._is_ours(host):
        assert (
            host.lower().rsplit(":", 1)[0].strip("[]") in ("localhost", "127.0.0.1", "::1", ":")
            or host == "[::1]"
            or host == "::1"
        )


POINTS = st.lists(st.tuples(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12)), min_size=1, max_size=8).map(sorted)


@given(points=POINTS, log=st.booleans(), limit=st.none() | st.floats(1e-12, 1e12))
@settings(max_examples=150, deadline=None)
def test_any_curve_can_be_drawn(points, log, limit):
    text = Chart(title="t", words="w", x="x", y="y", points=points, limit=limit, log_x=log, log_y=log).svg()
    assert "nan" not in text and "inf" not in text and text.count("<text") < 40
    assert all(len(row) == 2 for row in Chart(title="t", words="w", x="x", y="y", points=points).rows)


@given(st.none() | st.floats() | st.integers(-(10**18), 10**18))
def test_any_number_can_be_written(x):
    assert 0 < len(number(x)) < 24
