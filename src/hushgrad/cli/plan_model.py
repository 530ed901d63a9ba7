"""``hushgrad plan --model``: memory and time of a private step of a language model."""

from __future__ import annotations

import math
from typing import Any

from hushgrad import _check
from hushgrad.cli._parser import Parser, say, table, whole
from hushgrad.planner.model_shapes import human, shape_of
from hushgrad.planner.resources import TUNED, Choice, Work, choices

_SHOWN = 12


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Peak memory and time of a private step of a language model, by placement, mechanism and micro-batch.",
        example="hushgrad plan --model smollm2-135m --tune lora --processes 2 --device-memory 8 --batch-size 1024 --length 256",
        form=" --model NAME",
    )
    parser.takes("--model NAME|CONFIG", "a known name, or the path of a config.json (or of its folder)", required=True)
    parser.takes("--tune", "adapters or all weights; both by default", choices=TUNED)
    parser.takes("--rank", "of the adapters (default 4)", type=whole, default=4)
    parser.takes("--processes W", "that share each batch (default 1)", type=whole, default=1)
    parser.takes("--device-memory GB", "of one process, in 1e9 bytes", type=float, default=math.inf)
    parser.takes("--batch-size B", "examples of a step, of all processes (default 256)", type=whole, default=256)
    parser.takes("--length T", "tokens of an example (default 512)", type=whole, default=512)
    return parser


def run(words: list[str]) -> int:
    """Answer; see ``hushgrad plan --model NAME --help``."""
    options = _parser().parse(words)
    _check.positive(device_memory=options.device_memory) if options.device_memory != math.inf else None
    sizes: dict[str, Any] = {
        name: _check.positive_int(**{name: vars(options)[name]}) for name in ("rank", "processes", "batch_size", "length")
    }
    shape = shape_of(options.model)
    if shape.positions and options.length > shape.positions:
        _check.fail("--length", options.length, f"to be at most the model's {shape.positions} positions")
    found = [
        choices(Work(shape=shape, tuned=tuned, **sizes), device_memory=1e9 * options.device_memory)
        for tuned in ([options.tune] if options.tune else TUNED)
    ]
    content = {"parameters": shape.parameters, "choices": [one.to_json() for each in found for one in each], "fit": _FIT}
    step = f"{options.batch_size} examples of {options.length} tokens a step"
    head = f"{options.model}: {human(shape.parameters)} parameters, {step}"
    return say(options, content, head, *(f"\n{_text(each)}" for each in found), f"\n{_FIT}")


_FIT = (
    "Fitted to one thread of a CPU and models of less than 10 million parameters (float32 weights, Adam); memory is above what is "
    "imported, and mostly that of the proof in the first step. Both are within 20 % for models that were not fitted, of up to 18 million "
    "parameters in one process (docs/scale.md); far beyond, an order of magnitude. hushgrad.planner.dry_run measures yours."
)


def _text(found: list[Choice]) -> str:
    rows: list[tuple[str, ...]] = [("tuned", "placement", "mechanism", "micro-batch", "peak", "step", "")]
    for one in found[:_SHOWN]:
        work = one.work
        cost = (f"{human(one.peak)}B", f"{one.seconds:.3g} s", "" if one.fits else "does not fit")
        rows.append((work.tuned, work.placement, one.mechanism, str(work.micro_batch), *cost))
    if not any(one.fits for one in found):
        least = human(min(one.peak for one in found))
        return f"{table(rows)}\nNothing fits: the smallest needs {least}B. Shard over more processes, or train adapters."
    return table(rows)
