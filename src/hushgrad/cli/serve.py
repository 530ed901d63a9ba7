"""``hushgrad serve``: the web page with the planner, runs in progress, cards and the ledger."""

from __future__ import annotations

import sys
from pathlib import Path

from hushgrad.cli._parser import Parser, say, whole

_USUAL = "runs"  # where the tutorial's runs are


def _parser() -> Parser:
    parser = Parser(
        "serve",
        "A local web page: the planner, runs in progress, privacy cards and the budget ledger. It is read-only, loads nothing\n"
        "from elsewhere, and is seen from this machine only unless --host says otherwise. Ctrl-C ends it.",
        example="hushgrad serve runs --ledger budget.db --open",
    )
    parser.takes("runs RUNS_FOLDER", f"run folders are read below it, and nowhere else (default: {_USUAL}, if any)", nargs="?")
    parser.takes("--ledger URL", "the budget ledger: a path or a database URL")
    parser.takes("--policy FILE", "a policy in TOML (default: the variable HUSHGRAD_POLICY)")
    parser.takes("--port N", "port (default 8642); 0 takes any that is free", type=whole, default=8642)
    parser.takes("--host H", "address to listen at; other than loopback, visitors need a token", default="127.0.0.1")
    parser.flag("--token", "ask for a token on loopback too: this machine has other users")
    parser.flag("--raw", "show un-noised metrics: a page as sensitive as the data")
    parser.flag("--open", "open the page in the browser")
    return parser


def run(words: list[str]) -> int:
    """Serve; see ``hushgrad serve --help``."""
    options = _parser().parse(words)
    from hushgrad.budget import read_policy
    from hushgrad.serve import Settings, serve

    read_policy(options.policy)  # one that cannot be read is told now, and not to the first visitor
    usual = Path(_USUAL) if Path(_USUAL).is_dir() else None
    settings = Settings(
        runs=usual if options.runs is None else Path(options.runs),
        ledger=options.ledger,
        policy=options.policy,
        host=options.host,
        port=options.port,
        raw=options.raw,
        token=Settings.fresh_token() if options.token else "",
    )
    if not settings.is_loopback:
        print(
            f"Warning: at {settings.host} the page can be reached from the network, and its traffic is not encrypted. Visitors need "
            "the token in the address below. Safer: leave --host out and use a tunnel (ssh -L 8642:localhost:8642).",
            file=sys.stderr,
        )

    def ready(address: str) -> None:
        content = {"address": address, "runs": None if settings.runs is None else str(settings.runs)}
        say(options, content, f"The page is at {address}  (Ctrl-C ends it)")
        if options.open:
            import webbrowser

            webbrowser.open(address)

    try:
        serve(settings, ready=ready)
    except KeyboardInterrupt:
        print("Ended.", file=sys.stderr)
    return 0
