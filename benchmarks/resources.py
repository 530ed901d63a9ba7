"""What `hushgrad plan --model` predicts, beside measurements: time and peak memory of a private step of language models.

    python benchmarks/resources.py --measure out.json      CPU time (one thread) and peak memory of every setting below (10 minutes)
    python benchmarks/resources.py --measure out.json --last   of four models that no fit has seen, beside what is predicted
    python benchmarks/resources.py --fit out.json          fit to some of the settings, and show the others

The settings that are fitted and the settings that are shown share no model. Memory is what a process of its own holds at most in
the first steps, which prove the model, above what it held after a step of a tiny one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import peft  # noqa: F401 (before memory is looked at)
from language import Setting, in_a_child, peak_of, private
from scipy.optimize import nnls

from hushgrad.planner.model_shapes import shape_of
from hushgrad.planner.resources import Work

FITTED = [
    Setting(hidden=128, layers=2, vocabulary=512),
    Setting(hidden=256, layers=4),
    Setting(hidden=128, layers=6, length=32, part=16),
    Setting(hidden=384, layers=2, vocabulary=4096, length=128, part=4, size=8),
    Setting(hidden=256, layers=2, bands=4, part=4, size=8),
    Setting(family="gpt2", hidden=128, layers=2, vocabulary=512, size=16),
    Setting(hidden=64, layers=2, vocabulary=32000, part=4, size=8),
    Setting(hidden=96, layers=2, vocabulary=12000, length=32, size=16),
    Setting(family="gpt2", hidden=192, layers=4, vocabulary=3000, part=4, size=8),
    Setting(family="gpt2", hidden=64, layers=2, vocabulary=30000, length=32, part=4, size=8),
    Setting(family="gpt2", hidden=96, layers=2, vocabulary=50257, part=2, size=4),
]
SHOWN = [
    Setting(hidden=320, layers=3, vocabulary=8192, part=4, size=8),
    Setting(hidden=192, layers=4, vocabulary=1024, length=128, part=4, size=16),
    Setting(family="gpt2", hidden=256, layers=3, vocabulary=5000, part=8, size=16),
    Setting(hidden=128, layers=3, vocabulary=20000, length=32, part=8, size=16),
    Setting(hidden=160, layers=3, vocabulary=49152, length=48, part=4, size=8),
    Setting(family="gpt2", hidden=160, layers=3, vocabulary=10000, part=4, size=8),
    Setting(hidden=384, layers=6, vocabulary=8192, part=4, size=8),
]
UNSEEN = [  # measured when the fit stood
    Setting(family="gpt2", hidden=128, layers=4, vocabulary=20000, length=32, part=4, size=8),
    Setting(hidden=224, layers=5, vocabulary=6000, length=96, part=2, size=8),
    Setting(hidden=192, layers=3, vocabulary=15000, length=48, part=8, size=16),
    Setting(hidden=288, layers=5, vocabulary=3000, length=80, part=4, size=8),
    Setting(family="gpt2", hidden=224, layers=3, vocabulary=8000, length=48, part=4, size=8),
    Setting(family="gpt2", hidden=128, layers=6, vocabulary=2000, length=96, part=2, size=4),
]
LAST = [  # measured later, on code that the fit has not seen
    Setting(hidden=208, layers=4, vocabulary=9000, length=56, part=4, size=8),
    Setting(family="gpt2", hidden=176, layers=5, vocabulary=6000, part=4, size=8),
    Setting(hidden=112, layers=5, vocabulary=25000, length=40, part=4, size=8),
    Setting(family="gpt2", hidden=256, layers=2, vocabulary=12000, length=96, part=2, size=4),
]
MODES = ("lora", "full")
KINDS = ("seconds", "peak")


def work_of(setting: Setting) -> Work:
    """The step as the planner sees it."""
    noise = {"state": setting.bands - 1, "traffic": setting.bands if setting.bands > 1 else 0}
    sizes = {"length": setting.length, "batch_size": setting.size, "micro_batch": setting.part}
    return Work(shape=shape_of(setting.config().to_dict()), tuned=setting.mode, **sizes, **noise)


# Measuring ----------------------------------------------------------------------------------------------------------------


def time_of(setting: Setting) -> float:
    """CPU seconds of a step after the first two, which also prove the model, with a C library that keeps what was freed.

    As it is, that library gives large blocks back and asks for them anew; what this costs depends on the heap, up to twice the step where
    the vocabulary is large, in plain runs as in private ones.
    """
    library = ctypes.CDLL(None)
    library.mallopt(-4, 0), library.mallopt(-1, 2**31 - 1)  # no blocks of their own, nothing given back
    step, times = private(setting), []
    for _ in range(9):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    return median(times[2:])


def measured(setting: Setting, kind: str) -> float:
    """CPU seconds, or bytes at the most in the first steps: above a step of a tiny model, with the heap as it is."""
    return in_a_child(partial(time_of, setting)) if kind == "seconds" else peak_of("private", setting, alive=False)[0] * 2**20  # type: ignore[no-any-return]


def measure(path: Path, settings: list[Setting], kinds: list[str]) -> None:
    rows = json.loads(path.read_text()) if path.exists() else []
    for setting in (replace(one, mode=mode) for one in settings for mode in MODES):
        row = next((row for row in rows if row["setting"] == asdict(setting)), None)  # of an earlier call
        if row is None:
            rows.append(row := {"setting": asdict(setting)})
        for kind in (kind for kind in kinds if kind not in row):
            row[kind] = measured(setting, kind)
            told = work_of(setting).seconds() if kind == "seconds" else work_of(setting).peak()
            print(f"{setting} {kind}: {row[kind]:.4g}, predicted {told:.4g}, {told / row[kind] - 1:+.0%}", flush=True)
            path.write_text(json.dumps(rows, indent=1))


# Fitting ------------------------------------------------------------------------------------------------------------------


def fitted(pairs: list[tuple[tuple[float, ...], float, float]]) -> np.ndarray:
    """Coefficients that are not negative, by least squares of what is off relative to the measured value."""
    rows = np.array([np.array(features) / value for features, _, value in pairs])
    target = np.array([(value - known) / value for _, known, value in pairs])
    scale = rows.max(axis=0)
    scale[scale == 0] = 1
    return nnls(rows / scale, target)[0] / scale


def pair_of(setting: Setting, kind: str, value: float) -> tuple[tuple[float, ...], float, float]:
    work = work_of(setting)
    return (work.spent(), work.carried(), value) if kind == "seconds" else (work.held(), work.kept, value)


def fit(path: Path) -> dict[str, Any]:
    rows = json.loads(path.read_text())
    found: dict[str, Any] = {}
    for kind, mode in ((kind, mode) for kind in KINDS for mode in MODES):
        settings = {Setting(**row["setting"]): row[kind] for row in rows if row["setting"]["mode"] == mode and kind in row}
        pairs = {one: pair_of(one, kind, value) for one, value in settings.items()}
        coefficients = fitted([pair for one, pair in pairs.items() if replace(one, mode="full") in FITTED])
        found[f"{kind}, {mode}"] = [float(f"{c:.3g}") for c in coefficients]
        for one, (features, known, value) in pairs.items():
            predicted = known + float(np.dot(coefficients, features))
            title = "fitted" if replace(one, mode="full") in FITTED else "shown "
            size = (
                f"{one.family} h {one.hidden} L {one.layers} V {one.vocabulary} T {one.length} part {one.part} bands {one.bands}"
            )
            print(
                f"{title} {kind:<7} {mode} {size}: measured {value:.4g}, predicted {predicted:.4g}, {predicted / value - 1:+.0%}"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help="add measurements to this file")
    parser.add_argument("--last", action="store_true", help="measure the last group of settings only")
    parser.add_argument("--fit", type=Path, help="fit to the measurements of this file")
    parser.add_argument("--only", choices=KINDS, help="measure time or memory alone")
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, LAST if args.last else FITTED + SHOWN + UNSEEN + LAST, [args.only] if args.only else [*KINDS])
    if args.fit:
        print(json.dumps(fit(args.fit)))


if __name__ == "__main__":
    main()
