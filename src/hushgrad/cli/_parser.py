"""Argument parsing for all commands: the standard library's, with one clear sentence for a mistake."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from hushgrad._printed import plain


class UsageError(Exception):
    """The command line is wrong; the message is one sentence for the user."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """`` Did you mean X?`` for the known word with this prefix, or the closest one, or nothing."""
    known = list(known)
    close = [name for name in known if word and name.startswith(word)] or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """``argparse`` that raises :class:`UsageError`, never guesses abbreviations, and suggests the option that was meant."""

    def __init__(self, command: str, about: str, *, example: str, form: str = "", also: Iterable[str] = ()) -> None:
        """``form``: the words that select this form of a command that has several; ``also``: those of its other forms."""
        self._form, self._also = form, also
        super().__init__(
            prog=f"hushgrad {command}",
            description=about,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.flag("--json", "print one JSON object instead of text")

    def takes(self, words: str, about: str | None = None, **how: Any) -> None:
        """An argument by its name and, after a space, the word for its value: ``takes("--out DIR", "where to write")``."""
        name, _, value = words.partition(" ")
        how |= {"type": _number} if how.get("type") is float else {}
        self.add_argument(name, help=about, **({"metavar": value, **how} if value else how))

    def flag(self, name: str, about: str) -> None:
        """An option without a value."""
        self.add_argument(name, action="store_true", help=about)

    def parse(self, words: list[str]) -> argparse.Namespace:
        """The parsed words; ``--help`` prints and exits with 0."""
        known = [option for action in self._actions for option in action.option_strings]
        for word in (word.split("=")[0] for word in words if word.startswith("--")):
            if word not in known:  # said first: a misspelt option is the likelier mistake than a missing one
                meant, asked = suggestion(word, [*known, *self._also]), f"{self.prog}{self._form}"
                raise UsageError(f"{asked} has no option {word}.{meant} Try {asked} --help.")
        return self.parse_args(words)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing a usage block and exiting."""
        sentence = message[0].upper() + message[1:]
        raise UsageError(f"{sentence}{'' if sentence.endswith('.') else '.'} Try {self.prog}{self._form} --help.")


def ask(sentences: Iterable[str]) -> None:
    """Print questions about a claim to stderr, so that stdout stays machine-readable."""
    for sentence in sentences:
        print(f"Question: {sentence}", file=sys.stderr)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number such as 8 or 1e-5, got {text!r}") from None


def whole(text: str) -> int:
    """An integer; 1e6 is one."""
    try:
        return int(text)
    except ValueError:
        with contextlib.suppress(ValueError):
            if float(text).is_integer():
                return int(float(text))
    raise argparse.ArgumentTypeError(f"expected a whole number such as 60000 or 6e4, got {text!r}")


def print_json(content: dict[str, Any]) -> None:
    """One JSON object; infinity, which JSON lacks, as the string "inf"."""
    print(json.dumps(plain(content), indent=2))


def say(options: argparse.Namespace, content: dict[str, Any], *texts: object) -> int:
    """Print a command's answer: ``content`` with ``--json``, otherwise ``texts``, one per line. Returns the exit code 0."""
    if options.json:
        print_json(content)
    else:
        print(*texts, sep="\n")
    return 0


def quoted(word: str) -> str:
    """A word as a TOML string, whatever is in it."""
    return json.dumps(word, ensure_ascii=False)


def table(rows: Sequence[tuple[str, ...]], *, headed: bool = True) -> str:
    """Rows of words with aligned columns; on a terminal too narrow for three columns, cells below each other.

    The first row contains the column heads unless ``headed`` is False.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    room = _room()
    if len(widths) > 2 and sum(widths) + 2 * len(widths) - 2 > room:
        heads = [f"{head}: " if head else "" for head in rows[0]] if headed else [""] * len(widths)
        lines = [
            f"  {head}{word}" if i else word
            for row in rows[headed:]
            for i, (head, word) in enumerate(zip(heads, row, strict=True))
            if word
        ]
        return "\n".join(map(wrapped, lines))
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def wrapped(line: str) -> str:
    """A line wrapped at the width of the terminal."""
    return textwrap.fill(line, _room(), subsequent_indent="    ", break_on_hyphens=False) if len(line) > _room() else line


def _room() -> int:
    """The width of the terminal; unlimited for a file."""
    return max(20, shutil.get_terminal_size(fallback=(sys.maxsize, 24)).columns)
