"""``hushgrad report``: the privacy card of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from hushgrad import _check
from hushgrad._printed import plain
from hushgrad.cli._parser import Parser, UsageError, say
from hushgrad.cli._paths import require_place
from hushgrad.cli._waiting import waiting
from hushgrad.errors import ArgumentError, PolicyRefused
from hushgrad.release.erasure import finish

if TYPE_CHECKING:
    from hushgrad.report import Card


def _parser() -> Parser:
    parser = Parser(
        "report",
        "The privacy card of a finished run: the guarantee in plain words and in full, curves, audit, citations.\n"
        "Without options the card is printed as Markdown. The run's checkpoint and key are never read.\n\n"
        "  hushgrad report --new-signer officer.key               a key to sign with, and officer.key.pub for others\n"
        "  hushgrad report RUN --sign officer.key --save c.json\n"
        "  hushgrad report --verify c.json model.safetensors --signer officer.key.pub",
        example="hushgrad report runs/mnist --html card.html --markdown card.md",
    )
    parser.takes("run RUN", "the folder of a hushgrad train run; with --verify: the model", nargs="?")
    parser.takes("--html PATH", "write one self-contained page (needs hushgrad[report])")
    parser.takes("--markdown PATH", "write a section for a model card")
    parser.takes("--citations PATH", "write the BibTeX entries")
    parser.takes("--save PATH", "write the card as JSON, the form that can be verified")
    parser.takes("--sign KEY", "sign what --save writes, with this secret key")
    parser.takes("--by NAME", "who signs; part of what is signed", default="")
    parser.takes("--verify CARD", "check a saved card: signature, epsilon, and MODEL if it is given")
    parser.takes("--signer PUB", "with --verify: the public key of whoever must have signed")
    parser.takes("--new-signer KEY", "make a key to sign with, and its public half KEY.pub")
    parser.takes("--policy FILE", "a policy that must allow the claim (default: the variable HUSHGRAD_POLICY), or the card's own")
    parser.takes("--ledger PLACE", "look the run up in this budget ledger; a path or postgresql://...")
    parser.flag("--raw", "add un-noised metrics: a card as sensitive as the data")
    return parser


def run(words: list[str]) -> int:
    """Write, sign or verify the card; see ``hushgrad report --help``."""
    options = _parser().parse(words)
    _require_sense(options)
    if options.new_signer:
        return _new_signer(options)
    if options.verify:
        return _verify(options)
    return _card(options)


def _require_sense(options: argparse.Namespace) -> None:
    jobs = [name for name, wanted in (("--new-signer", options.new_signer), ("--verify", options.verify)) if wanted]
    written = [name for name in ("html", "markdown", "citations", "save", "sign", "ledger", "raw") if vars(options)[name]]
    if len(jobs) > 1 or (jobs and written) or (options.new_signer and options.run):
        raise UsageError(f"{jobs[0]} stands alone: it makes no card. Try hushgrad report --help.")
    if options.signer and not options.verify:
        raise UsageError("--signer goes with --verify CARD: it says who must have signed.")
    if (options.sign and not options.save) or (options.by and not options.sign):
        raise UsageError("--sign KEY goes with --save PATH (the file that is signed), and --by with --sign.")
    if not jobs and options.run is None:
        raise UsageError("Which run? Give the --out of hushgrad train, or --verify CARD, or --new-signer KEY.")


def _new_signer(options: argparse.Namespace) -> int:
    from hushgrad.report.signature import new_signing_key

    fingerprint = new_signing_key(options.new_signer)
    content = {"key": options.new_signer, "public": f"{options.new_signer}.pub", "fingerprint": fingerprint}
    words = f"Key {fingerprint}: keep {options.new_signer} secret, and give {options.new_signer}.pub to those who verify."
    return say(options, content, words)


def _verify(options: argparse.Namespace) -> int:
    from hushgrad.budget import read_policy
    from hushgrad.report.signature import verify

    policy = None if options.policy is None else read_policy(options.policy)  # a card of others need not know our variable
    try:
        found = verify(options.verify, model=options.run, signer=options.signer, policy=policy)
    except (ArgumentError, PolicyRefused) as error:
        say(options, {"verified": False, "problem": str(error)}, f"NOT VERIFIED. {error}")
        return 1
    facts = {"by": found.by, "signer": found.signer, "trusted": found.trusted, "model": found.model}
    return say(options, {"verified": True, "guarantee": found.guarantee.to_json(), **facts}, found)


def _card(options: argparse.Namespace) -> int:
    finish(options.run)
    if not (Path(options.run) / "plan.json").is_file():  # said before torch is imported
        remedy = "Give the --out of hushgrad train."
        _check.fail("run", options.run, "to be the folder of a run, with plan.json in it", remedy)
    require_place(options.html, options.markdown, options.citations, options.save)
    with waiting("Making the card"):
        from hushgrad.budget import Ledger, read_policy
        from hushgrad.release.atomic import written
        from hushgrad.report import privacy_card

        ledger = None if options.ledger is None else Ledger(options.ledger)
        card = privacy_card(options.run, raw=options.raw, policy=read_policy(options.policy), ledger=ledger)
        makers = {"html": card.to_html, "markdown": card.to_markdown, "citations": lambda: card.citations}
        makers["save"] = lambda: _saved(card, options.sign, options.by)
        wanted = {kind: vars(options)[kind] for kind in makers if vars(options)[kind]}
        for kind, path in wanted.items():
            written(path, makers[kind]())
    texts = [card.guarantee, f"Written: {', '.join(wanted.values())}"] if wanted else [card.to_markdown()]
    return say(options, card.to_json(), *texts)


def _saved(card: Card, key: str | None, by: str) -> str:
    """The card's JSON as it is verified, with a signature if there is a key."""
    from hushgrad.report.signature import sign

    return json.dumps(plain(card.to_json()) if key is None else sign(card, key, by=by), indent=2) + "\n"
