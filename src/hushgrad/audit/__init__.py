"""Audit: attacks on private runs, which bound the true epsilon from below.

A lower bound above the claimed epsilon refutes the claim. One close to it supports that the code does what the theorem says; an audit
never proves privacy.
"""

from __future__ import annotations

from hushgrad.audit.auditor import Auditor
from hushgrad.audit.bench import Bench
from hushgrad.audit.bounds import (
    ErrorRates,
    curve_gap,
    epsilon_clopper_pearson,
    epsilon_gaussian,
    error_rates,
    grid_rates,
    split_rates,
)
from hushgrad.audit.checks import Check
from hushgrad.audit.composed_bounds import step_bounds
from hushgrad.audit.deep_audit import audit_run
from hushgrad.audit.example_canaries import mislabelled, out_of_distribution
from hushgrad.audit.exposure import exposure, secret_sequences, sequence_losses
from hushgrad.audit.gradient_canaries import Canaries
from hushgrad.audit.inversion import invert, likeness
from hushgrad.audit.membership import MembershipReport, membership_inference
from hushgrad.audit.one_run import epsilon_one_run, epsilon_one_run_fdp
from hushgrad.audit.report import AuditReport, DeepReport, LowerBound
from hushgrad.audit.worst_record_search import worst_record

__all__ = [
    "AuditReport",
    "Auditor",
    "Bench",
    "Canaries",
    "Check",
    "DeepReport",
    "ErrorRates",
    "LowerBound",
    "MembershipReport",
    "audit_run",
    "curve_gap",
    "epsilon_clopper_pearson",
    "epsilon_gaussian",
    "epsilon_one_run",
    "epsilon_one_run_fdp",
    "error_rates",
    "exposure",
    "grid_rates",
    "invert",
    "likeness",
    "membership_inference",
    "mislabelled",
    "out_of_distribution",
    "secret_sequences",
    "sequence_losses",
    "split_rates",
    "step_bounds",
    "worst_record",
]
