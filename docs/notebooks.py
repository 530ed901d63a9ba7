"""Notebooks from pages: ``make notebooks`` writes docs/notebooks/NAME.ipynb for each NAME.md; a test runs and compares them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"


def cells(page: str) -> list[dict[str, Any]]:
    """Text and code of a page, in order."""
    found = []
    for number, part in enumerate(re.split(r"^```python\n(.*?)^```\n", page, flags=re.DOTALL | re.MULTILINE)):
        text = part.strip("\n")
        if not text:
            continue
        source = text.splitlines(keepends=True)
        name = f"cell-{number}"
        if number % 2:
            found.append(
                {"cell_type": "code", "id": name, "execution_count": None, "metadata": {}, "outputs": [], "source": source}
            )
        else:
            found.append({"cell_type": "markdown", "id": name, "metadata": {}, "source": source})
    return found


def notebook(page: str) -> str:
    """A page as the JSON of a notebook."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells(page), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all notebooks."""
    for page in sorted(FOLDER.glob("*.md")):
        page.with_suffix(".ipynb").write_text(notebook(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
