"""The licences of what each extra pulls in: ``make licences`` writes docs/licences.md, a test compares.

Read from the metadata of the installed packages, through all that they require in turn on this platform.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
USED = ("", "report", "sklearn", "serve", "ledger", "ledger-postgresql", "hf", "trl", "lightning", "federated", "tensorboard")
HEAD = """# Licences

hushgrad is under the Apache License 2.0. What it pulls in, as the packages themselves declare it, by extra; a package stands with the
first extra that needs it, with everything that it requires in turn. Written by `make licences`; versions are those of `constraints.txt`.
`make sbom` writes the same environment as CycloneDX.

Copyleft licences of any strength are marked. `pip install hushgrad` and `hushgrad[serve]` pull in none; the PostgreSQL driver
`psycopg` (LGPL) comes with `hushgrad[ledger-postgresql]` only, and any other driver of SQLAlchemy serves as well.
"""
_COPYLEFT = re.compile(r"GPL|General Public|MPL|Mozilla|EPL|CDDL|EUPL", re.I)


def extras() -> dict[str, list[Requirement]]:
    """The declared requirements of each extra; "" is what every installation has. References among extras are resolved."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {"": project["dependencies"], **project["optional-dependencies"]}

    def resolved(name: str) -> list[Requirement]:
        found = []
        for text in declared[name]:
            one = Requirement(text)
            found += [r for extra in sorted(one.extras) for r in resolved(extra)] if one.name == "hushgrad" else [one]
        return found

    return {name: resolved(name) for name in USED}


def closure(wanted: list[Requirement]) -> dict[str, str]:
    """Name and licence of everything that these requirements pull in here; what is not installed is left out."""
    found: dict[str, str] = {}
    waiting = [(one, extra) for one in wanted for extra in ("", *one.extras)]
    seen = set()
    while waiting:
        one, extra = waiting.pop()
        name = canonicalize_name(one.name)
        if (name, extra) in seen or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        seen.add((name, extra))
        try:
            found[name] = licence(name)
        except PackageNotFoundError:
            continue
        for text in requires(name) or []:
            next_one = Requirement(text)
            if next_one.marker is None or next_one.marker.evaluate({"extra": extra}):
                next_one.marker = None
                waiting += [(next_one, more) for more in ("", *next_one.extras)]
    return dict(sorted(found.items()))


def licence(name: str) -> str:
    """As the package declares it: an SPDX expression, a short text, or its classifiers."""
    about = metadata(name)
    expression = about.get("License-Expression")
    text = (about.get("License") or "").strip()
    classifiers = [line.split(" :: ")[-1] for line in about.get_all("Classifier") or [] if line.startswith("License ::")]
    if expression:
        return str(expression)
    if classifiers:
        return ", ".join(sorted(set(classifiers)))
    return text.splitlines()[0][:80] if text else "not declared; see the package"


def page() -> str:
    """The whole page."""
    lines, known = [HEAD, "| extra | package | licence |", "|---|---|---|"], set()
    for extra, wanted in extras().items():
        absent = {canonicalize_name(one.name): "not installed where this was written" for one in wanted if one.marker is None}
        for name, text in sorted((absent | closure(wanted)).items()):
            if name not in known:
                known.add(name)
                mark = " **(copyleft)**" if _COPYLEFT.search(text) else ""
                lines.append(f"| {extra or 'always'} | {name} | {text}{mark} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page())
