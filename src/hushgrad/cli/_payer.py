"""``--ledger PLACE --dataset NAME --policy FILE`` of the commands that train: who pays, and what is allowed."""

from __future__ import annotations

import argparse

from hushgrad.cli._parser import UsageError


def require_payer(options: argparse.Namespace) -> None:
    """Refuse a ledger, a data set or a policy that is not there, before torch is imported and the data are read."""
    if (options.ledger is None) != (options.dataset is None):
        raise UsageError("--ledger and --dataset belong together: who pays, and from which budget.")
    from hushgrad.budget import Ledger, read_policy

    read_policy(options.policy)
    if options.ledger is not None:
        ledger = Ledger(options.ledger)
        ledger.dataset(options.dataset)
        ledger.close()
