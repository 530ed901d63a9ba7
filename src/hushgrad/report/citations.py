"""Citations: BibTeX for exactly what a plan uses; every class names the papers behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hushgrad import _check
from hushgrad._papers import Paper
from hushgrad._value import Value
from hushgrad.accounting.api import accountant_of
from hushgrad.accounting.base import Accountant
from hushgrad.train.plan import Plan


def citation(plan: Plan, *, accountant: str | Accountant = "pld") -> str:
    """BibTeX for exactly what ``plan`` uses: its mechanism, sampling, clipping, denoising, averaging and the accountant.

    >>> plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=100, steps=3)
    >>> [line for line in citation(plan).splitlines() if line.startswith("@")]
    ['@inproceedings{abadi2016deep,', '@article{sommer2019privacy,', '@article{doroshenko2022connect,']
    """
    papers, unknown = papers_of(plan, accountant=accountant)
    # Somebody's own mechanism is used all the same, so that it names no paper is said.
    notes = [f"% {name}: names no paper; cite its own source." for name in unknown]
    return "\n\n".join([*(paper.bibtex() for paper in papers), *notes]) + "\n"


def papers_of(plan: Plan, *, accountant: str | Accountant = "pld") -> tuple[list[Paper], list[str]]:
    """(papers behind a plan, each once, in the order of use; names of classes that name none)."""
    kinds = [*_parts(_check.instance(Plan, plan=plan)), type(accountant_of(accountant))]
    papers = [paper for kind in kinds for paper in _own(kind)]
    return list(dict.fromkeys(papers)), [kind.__name__ for kind in dict.fromkeys(kinds) if not _own(kind)]


def _own(kind: type) -> tuple[Paper, ...]:
    """The papers that a class itself names: one that changes another class is not described in that one's paper."""
    return vars(kind).get("papers", ())


def _parts(value: Value) -> Iterator[type]:
    """Classes of everything inside a value, however deep (a chain holds several denoisers)."""
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        held = getattr(value, field.name)
        for item in held if isinstance(held, tuple) else (held,):
            if isinstance(item, Value):
                yield type(item)
                yield from _parts(item)
