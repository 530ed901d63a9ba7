"""What each pass asks again is answered at a glance, and as the long way would."""

from __future__ import annotations

from collections import OrderedDict
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from hushgrad.clipping import Capture, Flat
from hushgrad.clipping.proof.state import Attributes
from hushgrad.clipping.site import hooked


@pytest.mark.parametrize("kind", ["leaf", "made", "view"])
@pytest.mark.parametrize("others", ["none", "before", "behind", "removed", "kept"])
def test_a_hook_without_a_handle_is_torchs_own(kind: str, others: str) -> None:
    def run(hook: Any) -> list[str]:
        heard: list[str] = []
        x = torch.ones(4, requires_grad=True)
        y = {"leaf": x, "made": x * 2, "view": (x * 2).view(2, 2)}[kind]
        if others == "before":
            y.register_hook(lambda g: heard.append(f"before {g.tolist()}"))
        if others == "kept":
            y.retain_grad()
        hook(y, lambda g: heard.append(f"ours {g.tolist()}"))
        if others in ("behind", "removed"):
            handle = y.register_hook(lambda g: g * 3)
            handle.remove() if others == "removed" else None
        (y * torch.arange(4.0).view_as(y)).sum().backward()
        return [*heard, str(x.grad), str(y.grad if others == "kept" else None)]

    assert run(hooked) == run(lambda y, f: y.register_hook(f))


def test_a_hook_or_child_where_there_was_none_is_another_wiring() -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.ReLU(), c=nn.Sequential()))
    attributes = Attributes(model)

    def wiring() -> int:
        return attributes.key(())[0]

    first = wiring()
    for register in ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook"):
        handle = getattr(model.b, register)(lambda *_: None)
        assert wiring() != first, register
        handle.remove()
        assert wiring() == first, register
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert wiring() != first
    everywhere.remove()
    assert wiring() == first
    model.c.add_module("d", nn.Tanh())
    assert wiring() != first


class _Any(nn.Module):
    """Texts of any length, padded or packed."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Any) -> Tensor:
        return self.head(self.rnn(x)[1][0][-1])  # type: ignore[no-any-return]


def test_the_last_question_about_inputs_is_answered_as_it_would_be_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = _Any()
    capture = Capture(model)
    capture.attach()
    known, answers = capture._root.known, []
    read_as = known.read_as

    def asked_twice(key: Any, tensors: list[Any], expected: int | None) -> Any:
        glance, known._asked = read_as(key, tensors, expected), None
        assert glance == read_as(key, tensors, expected)
        answers.append([n for n, _ in glance])
        return glance

    monkeypatch.setattr(known, "read_as", asked_twice)
    sizes = ((4, 5), (4, 5), (4, 5), (6, 5), (6, 5), (4, 5), (1, 5), (1, 5), (5, 5), (4, 7), (4, 7), (4, 6), (4, 6), (4, 5))
    for packed, (B, T) in product((False, True), sizes):
        x = [torch.randn(T, 3) for _ in range(B)]
        model(pack_sequence(x) if packed else torch.stack(x)).square().mean().backward()
        assert len(capture.collect(Flat(1.0)).raw_norms) == B
    assert [4] in answers
