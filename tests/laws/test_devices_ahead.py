"""Rows that the host draws one step ahead for a device: the same bits, one copy, the state of the last row, and no step without noise."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from patience import HANGS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hushgrad
from hushgrad import noise
from hushgrad.events import Once
from hushgrad.noise.source import Source
from hushgrad.noise.streams.prefetch import Ahead, Staging, drawn_ahead
from hushgrad.testing import devices

STEPS = 19  # more than two blocks of rows that the host solves together
MECHANISMS = {
    "independent": noise.Independent(),
    "blt": noise.BLT(buffers=3),
    "banded": noise.Banded(bands=4),
    "tree": noise.Tree(),
    "filter": noise.BandedInverse(bands=3),
}
SIZES, OFFSETS, INDICES = [300, 1, 77], [0, 5, (1 << 40) + 3], [0, 7, 2]
KINDS = [torch.float32, torch.float64, torch.float32]


def stream_of(name: str) -> Any:
    fixed = MECHANISMS[name].resolved(steps=STEPS, participation=Once())
    return fixed.stream(Source(seed=3), steps=STEPS)


def rows(stream: noise.NoiseStream, step: int, kind: str, out: list[Tensor] | None = None) -> list[Tensor]:
    likes = [torch.empty(n, dtype=dtype, device=kind) for n, dtype in zip(SIZES, KINDS, strict=True)] if out is None else out
    made = stream.rows(step, likes, indices=INDICES, offsets=OFFSETS, out=out, scale=0.3 + step)
    return [devices.on_host(row).clone() for row in made]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) and x.dtype is y.dtype for x, y in zip(a, b, strict=True))


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    pairs = list(zip(a["lanes"], b["lanes"], strict=True))
    places = all({**x, "state": 0} == {**y, "state": 0} for x, y in pairs)
    return places and all(torch.equal(x["state"][name], y["state"][name]) for x, y in pairs for name in y["state"])


@pytest.mark.parametrize("name", MECHANISMS)
def test_rows_drawn_ahead_have_the_same_bits_and_states_and_take_one_copy_of_each_type(name):
    here, plain = stream_of(name), stream_of(name)
    with devices.pretend() as device:
        there = drawn_ahead(stream_of(name))
        assert isinstance(there, Ahead)
        for step in range(STEPS):
            with device.counting() as meter:
                made = rows(there, step, "pretend")
            assert equal(made, rows(here, step, "cpu")) and equal(made, rows(plain, step, "pretend")), step
            assert same_state(there.state_dict(), here.state_dict()), step
            assert not meter.syncs and sum(meter.copies.values()) == 2  # float32 and float64
            assert sum(meter.bytes.values()) == 4 * 377 + 8


@pytest.mark.parametrize("name", ["independent", "blt"])
def test_rows_are_added_and_a_saved_state_goes_on_anywhere(name):
    with devices.pretend():
        first, plain = drawn_ahead(stream_of(name)), stream_of(name)
        for step in range(8):
            out = [torch.ones(n, dtype=dtype).to("pretend") for n, dtype in zip(SIZES, KINDS, strict=True)]
            expected = [row + 1 for row in rows(plain, step, "cpu")]
            assert equal(rows(first, step, "pretend", out), expected)
        saved = first.state_dict()
        expected = [rows(plain, step, "cpu") for step in (8, 9)][1]
        for kind in ("cpu", "pretend"):
            again = drawn_ahead(stream_of(name))
            again.load_state_dict(saved)
            assert equal([rows(again, step, kind) for step in (8, 9)][1], expected)
        first.load_state_dict(saved)  # over a row that was drawn ahead
        assert equal([rows(first, step, "pretend") for step in (8, 9)][1], expected)


def test_what_is_asked_for_otherwise_is_drawn_in_the_step():
    with devices.pretend():
        stream, plain = drawn_ahead(stream_of("blt")), stream_of("blt")
        both = [torch.empty(4, device="pretend"), torch.empty(3, device="pretend")]
        for step in range(3):
            whole = [devices.on_host(t).clone() for t in stream.rows(step, both)]
            assert equal(whole, plain.rows(step, [torch.empty(4), torch.empty(3)]))
        for step in range(3, 6):
            apart = [devices.on_host(stream.row(step, k, like)).clone() for k, like in enumerate(both)]
            assert equal(apart, plain.rows(step, [torch.empty(4), torch.empty(3)]))
        with pytest.raises(hushgrad.errors.ArgumentError, match="next row"):
            stream.rows(5, both)


class Late(Staging):
    """A device that reads a buffer as late as it may: when it is waited for."""

    def send(self) -> Tensor:
        self._there = torch.full_like(self.flat, torch.nan).to("pretend")
        self._read = False
        return self._there

    def wait(self) -> None:
        if "_there" in vars(self) and not self._read:
            devices.on_host(self._there).copy_(self.flat)
            self._read = True


def test_a_buffer_is_written_again_only_when_the_device_has_read_it():
    with devices.pretend():
        stream, plain = Ahead(stream_of("independent"), staging=Late), stream_of("independent")
        sent = [stream.rows(step, [torch.empty(9, device="pretend")])[0] for step in range(6)]
        stream.state_dict()  # the thread is done
        for step, row in enumerate(sent[:5]):  # row 6 is drawn: all buffers but that of row 5 were waited for
            assert torch.equal(devices.on_host(row), plain.row(step, 0, torch.empty(9))), step


def test_the_next_row_is_drawn_while_the_step_goes_on(monkeypatch):
    stream, computed = stream_of("independent"), threading.Event()
    inner = stream.rows

    def slow(step: int, *args: Any, **options: Any) -> list[Tensor]:
        assert step == 0 or computed.wait(HANGS)  # in the step itself this would never come
        return inner(step, *args, **options)

    monkeypatch.setattr(stream, "rows", slow)
    with devices.pretend():
        ahead = Ahead(stream)
        ahead.rows(0, [torch.empty(3, device="pretend")])
        computed.set()
        ahead.rows(1, [torch.empty(3, device="pretend")])


def trained(*, fails_at: int | None = None) -> list[Tensor]:
    """Weights after four steps; the thread that draws the row of one of them fails, and the step is taken again."""
    torch.manual_seed(0)
    plan = hushgrad.Plan.dpftrl(
        noise_multiplier=0.7, delta=1e-5, batch_size=6, dataset_size=24, steps=4, noise=noise.BLT(buffers=2), cipher="aes256"
    )
    with devices.pretend() as device:
        model = device.put(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        private = hushgrad.make_private(model, optimizer, plan, seed=0, check_isolation=False)
        g = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(24, 6, generator=g), torch.randint(3, (24,), generator=g))
        source, draw = type(private._release.source), type(private._release.source).buffer

        def failing(self: Source, step: int, *args: Any) -> None:
            if step == fails_at and threading.current_thread() is not threading.main_thread():
                raise MemoryError("of the thread")
            draw(self, step, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source, "buffer", failing)
            for x, y in private.loader(data):

                def step(x: Tensor = x, y: Tensor = y) -> None:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x.to("pretend")), y.to("pretend")).backward()
                    optimizer.step()

                if private.steps == fails_at:
                    before = [devices.on_host(p.detach()).clone() for p in model.parameters()]
                    with pytest.raises(MemoryError, match="of the thread"):
                        step()
                    after = [devices.on_host(p.detach()) for p in model.parameters()]
                    assert equal(before, after) and private.steps == fails_at
                    patch.setattr(source, "buffer", draw)
                step()
        private.detach()
        return [devices.on_host(p.detach()).clone() for p in model.parameters()]


def test_a_thread_that_fails_stops_the_step_and_its_row_is_drawn_again():
    assert equal(trained(fails_at=2), trained())
