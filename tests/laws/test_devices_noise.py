"""Noise that a device draws for itself has the bits that the host draws, for every mechanism, row, shard and resumption."""

from __future__ import annotations

import pytest
import torch

from hushgrad import noise
from hushgrad.events import Once
from hushgrad.noise.source import Source
from hushgrad.testing import devices

STEPS = 37  # more than two blocks of rows that the host solves together
MECHANISMS = {
    "independent": noise.Independent(),
    "blt": noise.BLT(buffers=3),
    "banded": noise.Banded(bands=4),
    "tree": noise.Tree(variant="plain"),
    "filter": noise.BandedInverse(bands=3),
}
SIZES, OFFSETS, INDICES = [300, 1, 77], [0, 5, (1 << 40) + 3], [0, 7, 2]


def stream_of(name: str) -> noise.NoiseStream:
    fixed = MECHANISMS[name].resolved(steps=STEPS, participation=Once())
    return fixed.stream(Source(seed=3, cipher="chacha20"), steps=STEPS)


def likes(kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty(n, dtype=dtype, device=kind) for n in SIZES]


def rows(stream: noise.NoiseStream, step: int, kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
    made = stream.rows(step, likes(kind, dtype), indices=INDICES, offsets=OFFSETS, scale=0.3)
    return [devices.on_host(row).clone() for row in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MECHANISMS)
def test_rows_have_the_hosts_bits_and_take_one_launch(name, dtype):
    here = stream_of(name)
    with devices.pretend() as device:
        there = stream_of(name)
        for step in range(STEPS):
            with device.counting() as meter:
                made = rows(there, step, "pretend", dtype)
            assert all(torch.equal(a, b) for a, b in zip(made, rows(here, step, "cpu", dtype), strict=True)), step
            if step:  # the first one makes the states
                assert sum(meter.launches.values()) == 1 and not meter.copies and not meter.syncs


@pytest.mark.parametrize("name", MECHANISMS)
def test_states_are_saved_and_taken_where_they_fit(name):
    with devices.pretend():
        first, expected = stream_of(name), []
        for step in range(20):
            expected = rows(first, step, "pretend", torch.float32)
            if step == 17:
                saved = first.state_dict()
        again = stream_of(name)
        again.load_state_dict(saved)
        made = [rows(again, step, "pretend", torch.float32) for step in (18, 19)][1]
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
        kept = any(lane["state"] for lane in saved["lanes"])
        assert again.takes(saved, likes("pretend", torch.float32)) and again.takes(saved, likes("cpu", torch.float32)) != kept


def test_sums_of_two_devices_and_a_scale_that_stays_there():
    with devices.pretend():
        stream, out = stream_of("independent"), [torch.ones(5, device="pretend"), torch.ones(3, device="pretend")]
        stream.rows(0, out, out=out, scale=torch.full((), 0.5, dtype=torch.float64, device="pretend"))
        expected = stream_of("independent").rows(0, [torch.empty(5), torch.empty(3)], scale=0.5)
        assert all(torch.equal(devices.on_host(a), b + 1) for a, b in zip(out, expected, strict=True))
