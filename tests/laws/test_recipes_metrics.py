"""The metrics of a run that goes on: what somebody else wrote among them is dropped, and never ends the run."""

from __future__ import annotations

import pytest

from hushgrad.recipes.session import _forget_after

ODD = [
    b"\xff\xfe",
    b'{"step": NaN}',
    b"[[[",
    b'{"step": 1e400}',
    b'{"step": ' + b"9" * 400 + b"}",
    b'{"step": [1]}',
    b"[" * 50_000,
    b'"step"',
]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_odd_lines_are_dropped(tmp_path, odd):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + odd + b'\n{"step": 2}\n{"step": 3}\n{"st')
    _forget_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
