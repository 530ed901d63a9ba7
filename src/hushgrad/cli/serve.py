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
    parser.add_argument(
        "runs",
        nargs="?",
        metavar="RUNS_FOLDER",
        help=f"run folders are read below it, and nowhere else (default: {_USUAL}, if any)",
    )
    parser.add_argument("--ledger", metavar="URL", help="the budget ledger: a path or a database URL")
    parser.add_argument("--policy", metavar="FILE", help="a policy in TOML (default: the variable HUSHGRAD_POLICY)")
    parser.add_argument("--port", type=whole, default=8642, metavar="N", help="port (default 8642); 0 takes any that is free")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="address to listen at; other than loopback, visitors need a token"
    )
    parser.add_argument("--token", action="store_true", help="ask for a token on loopback too: this machine has other users")
    parser.add_argument("--raw", action="store_true", help="show un-noised metrics: a page as sensitive as the data")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
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
        _warn(settings.host)

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


def _warn(host: str) -> None:
    print(
        f"Warning: at {host} the page can be reached from the network, and its traffic is not encrypted. Visitors need the token in "
        "the address below. Safer: leave --host out and use a tunnel (ssh -L 8642:localhost:8642).",
        file=sys.stderr,
    )
