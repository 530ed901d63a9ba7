"""``hushgrad release``: releases a model if a ledger has recorded it and the policy allows it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hushgrad import _check
from hushgrad.cli._parser import Parser, UsageError, say
from hushgrad.cli._paths import require_place
from hushgrad.errors import PolicyRefused

if TYPE_CHECKING:
    from hushgrad.budget import Dataset, Ledger, Policy
    from hushgrad.events import Event

_LONGEST_HEAD = 100_000_000  # bytes, as for readers of such files


def _parser() -> Parser:
    parser = Parser(
        "release",
        "Check that a model may leave the house: the ledger's chain is whole, a committed run has booked exactly this file, its budget is\n"
        "not exceeded, and as many people have approved it as the policy wants. Exit code 3: it may not.",
        example="hushgrad release runs/one --ledger budget.db --out public/model.safetensors",
    )
    parser.takes("model MODEL", "the folder of a run, or its model.safetensors")
    parser.takes("--ledger PLACE", "a path or postgresql://...", required=True)
    parser.takes("--policy FILE", "a policy in TOML (default: the variable HUSHGRAD_POLICY)")
    parser.takes("--out PATH", "copy the model file there")
    return parser


def run(words: list[str]) -> int:
    """Release; see ``hushgrad release --help``."""
    options = _parser().parse(words)
    from hushgrad.budget import BrokenChain, Ledger, read_policy
    from hushgrad.release.atomic import replacing

    policy = read_policy(options.policy)
    file = _file(options.model)
    require_place(options.out)
    if options.out and Path(options.out).exists():
        raise UsageError(f"--out {options.out} must be a new file.")
    try:
        found = released(Ledger(options.ledger), file, policy=policy)
    except BrokenChain as error:
        raise PolicyRefused(f"Not released: the ledger does not verify. {error}") from None
    if options.out:
        with replacing(Path(options.out), mode=0o666) as new:
            shutil.copyfile(file, new)
    by = f", approved by {', '.join(found['approved'])}" if found["approved"] else ""
    allowed = f"May be released: run {found['run']!r} on {found['dataset']!r} is {found['state']}{by}."
    written = [f"Written: {options.out}"] if options.out else []
    return say(options, found, allowed, f"Budget: {found['budget']}", *written)


def _file(model: str) -> Path:
    path = Path(model)
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{model} is no model file, and no folder with one. Give the --out of hushgrad train.")
    if not _begins_as_model(file):
        raise UsageError(f"{file} is no model file. Give the --out of hushgrad train, or its model.safetensors.")
    return file


def _begins_as_model(file: Path) -> bool:
    """Whether a file has the header of a model: its length in eight bytes, then JSON. The ledger's hash checks the rest."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            return isinstance(_check.parsed(stream.read(min(length, _LONGEST_HEAD)).decode()), dict)
        except ValueError:
            return False


def released(ledger: Ledger, file: Path, *, policy: Policy | None) -> dict[str, Any]:
    """The facts about a model that may be released.

    Args:
        ledger: where its run must be booked.
        file: the model.
        policy: what is allowed, and how many people must have approved the run.

    Raises:
        PolicyRefused: with what is missing.
    """
    from hushgrad.budget.file_digests import file_sha256

    digest = file_sha256(file)
    booked = ledger.booked(digest)
    if booked is None:
        raise PolicyRefused(
            f"Not released: no run in the ledger has booked {file.name} (SHA-256 {digest[:16]}...). Train it with --ledger and "
            "--dataset; a file that was changed afterwards is another one."
        )
    status = ledger.status(booked.dataset)
    if booked.overrun or status.exceeded:
        raise PolicyRefused(f"Not released: the budget is exceeded, or the run did more than it had reserved. {status}")
    approvals = 0 if policy is None else policy.approvals
    if policy is not None:
        _require_allowed(policy, status.dataset, booked.charged)
    if len(booked.approved) < approvals:
        raise PolicyRefused(
            f"Not released: the policy wants {approvals} approvals, and run {booked.id} has {len(booked.approved)}. "
            f"hushgrad ledger approve {ledger.place} {booked.id} --by NAME"
        )
    facts = {"run": booked.run, "dataset": booked.dataset, "state": booked.state, "approved": list(booked.approved)}
    return {**facts, "reservation": booked.id, "model_sha256": digest, "budget": str(status)}


def _require_allowed(policy: Policy, dataset: Dataset, charged: Event) -> None:
    """Require that the present policy allows what the run was charged, at the data set's delta."""
    from hushgrad.accounting import epsilon

    spent = epsilon(charged, delta=dataset.delta, relation=dataset.relation)
    policy.require(epsilon=spent, delta=dataset.delta, relation=dataset.relation, unit=dataset.unit)
