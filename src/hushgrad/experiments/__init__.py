"""Experiments: the results of the source papers, each reproducible by a command.

``hushgrad reproduce NAME`` runs one and writes its claims with verdicts, a picture and tables. An experiment is one file with a
function from :class:`Context` to :class:`Findings`, and one entry in ``experiments.toml``.
"""

from hushgrad.experiments.base import EXPERIMENTS, Claim, Context, Experiment, Findings, Table, find
from hushgrad.experiments.runner import Outcome, reproduce

__all__ = ["EXPERIMENTS", "Claim", "Context", "Experiment", "Findings", "Outcome", "Table", "find", "reproduce"]
