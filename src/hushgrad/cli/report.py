"""``hushgrad report``: the privacy card of a run."""

from __future__ import annotations

from pathlib import Path

from hushgrad import _check
from hushgrad.cli._parser import Parser, UsageError, print_json

__all__ = ["run"]


def _parser() -> Parser:
    parser = Parser(
        "report",
        "The privacy card of a finished run: the guarantee in plain words and in full, curves, audit, citations.\n"
        "Without options the card is printed as Markdown. The run's checkpoint and key are never read.",
        example="hushgrad report runs/mnist --html card.html --markdown card.md",
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a hushgrad train run")
    parser.add_argument("--html", metavar="PATH", help="write one self-contained page (needs hushgrad[report])")
    parser.add_argument("--markdown", metavar="PATH", help="write a section for a model card")
    parser.add_argument("--citations", metavar="PATH", help="write the BibTeX entries")
    parser.add_argument("--raw", action="store_true", help="add un-noised metrics: a card as sensitive as the data")
    return parser


def run(words: list[str]) -> int:
    """Write the card; see ``hushgrad report --help``."""
    options = _parser().parse(words)
    if not (Path(options.run) / "plan.json").is_file():  # said before torch is imported
        remedy = "Give the --out of hushgrad train."
        _check.fail("run", options.run, "to be the folder of a run, with plan.json in it", remedy)
    for path in filter(None, (options.html, options.markdown, options.citations)):
        if not Path(path).absolute().parent.is_dir():
            raise UsageError(f"Cannot write {path}: there is no such folder.")
    from hushgrad.report import privacy_card

    card = privacy_card(options.run, raw=options.raw)
    makers = {"html": card.to_html, "markdown": card.to_markdown, "citations": lambda: card.citations}
    wanted = {kind: vars(options)[kind] for kind in makers if vars(options)[kind]}
    for kind, path in wanted.items():
        _write(path, makers[kind]())
    if options.json:
        print_json(card.to_json())
    elif wanted:
        print(card.guarantee)
        print(f"Written: {', '.join(wanted.values())}")
    else:
        print(card.to_markdown())
    return 0


def _write(path: str, content: str) -> None:
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error}.") from None
