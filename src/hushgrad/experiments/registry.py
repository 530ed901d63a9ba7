"""All experiments: each is one file and one entry in ``experiments.toml``."""

from __future__ import annotations

from hushgrad import _check
from hushgrad.experiments.base import Experiment, tables

_TABLES = tables("experiments.toml")
SOURCES: dict[str, str] = _TABLES["sources"]
EXPERIMENTS: tuple[Experiment, ...] = tuple(Experiment(**entry) for entry in _TABLES["experiments"])
"""All experiments, in the order of the results page."""


def find(name: str) -> Experiment:
    """The experiment of that name; a misspelt one is answered with the closest.

    >>> find("tree").source
    '000'
    """
    return {experiment.name: experiment for experiment in EXPERIMENTS}[_check.one_of([e.name for e in EXPERIMENTS], name=name)]
