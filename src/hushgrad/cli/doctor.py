"""``hushgrad doctor``: measures private steps on this machine, as one table and one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hushgrad import _check
from hushgrad.cli._parser import Parser, say
from hushgrad.cli._paths import require_place
from hushgrad.cli._waiting import waiting
from hushgrad.release.atomic import replacing


def _parser() -> Parser:
    parser = Parser(
        "doctor",
        "Compares the noise kernels' bits with the reference, counts launches and waits of a private step on a pretend device (and\n"
        "waits on a real one, by torch's own debug mode), and times it beside plain PyTorch and Opacus. Takes less than five minutes.\n"
        "Exit code 1 if bits differ or a step waits. A table from a machine with a GPU is welcome in docs/hardware.md.",
        example="hushgrad doctor --out doctor.json",
    )
    parser.takes("--out FILE", "also write everything as JSON")
    parser.takes("--seconds", "for timing each of four models (default 6)", type=float, default=6.0)
    return parser


def run(words: list[str]) -> int:
    """Examine this machine; see ``hushgrad doctor --help``."""
    options = _parser().parse(words)
    require_place(options.out)
    _check.positive(seconds=options.seconds)
    with waiting("Examining this machine, a minute or two"):
        from hushgrad.testing import doctor  # torch, and the pretend device before any backward pass

        found: dict[str, Any] = {"machine": doctor.machine(), "bits": doctor.bits(), "counts": doctor.counts()}
        found["steps"] = doctor.ratios(options.seconds)
    if options.out:
        with replacing(Path(options.out), mode=0o644) as new:
            new.write_text(json.dumps(found, indent=1) + "\n")
    say(options, found, _table(found))
    waits = any(row["syncs"] for part in ("counts", "steps") for row in found[part].values())
    return int(waits or any(answer.startswith(("other", "failed")) for answer in found["bits"].values()))


def _table(found: dict[str, Any]) -> str:
    lines = [", ".join(f"{name} {value}" for name, value in found["machine"].items() if value is not None), ""]
    lines += [f"bits, {name}: {answer}" for name, answer in found["bits"].items()]
    for title, part in (("on the pretend device", "counts"), ("on this machine", "steps")):
        columns = list(dict.fromkeys(key for row in found[part].values() for key in row))
        lines += ["", f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {name} | {' | '.join(_cell(row.get(key)) for key in columns)} |" for name, row in found[part].items()]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:g}"
