"""A forger who knows how report.json names the files of a run, and writes it anew: what the files say must then contradict itself."""

from __future__ import annotations

import json
from pathlib import Path

from hushgrad.budget.file_digests import with_digests


def renamed(folder: Path) -> Path:
    """The folder, with a report that names its files as they are now."""
    report = json.loads((folder / "report.json").read_text())
    content = {name: value for name, value in report.items() if name not in ("files", "sha256")}
    (folder / "report.json").write_text(json.dumps(with_digests(folder, content, {})))
    return folder
