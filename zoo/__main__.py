"""``python -m zoo`` tries every model; ``python -m zoo --only mixtral --relation usual`` one of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path

_FAMILIES: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers_text", "transformers_causal", "transformers_senses"),
    "peft": ("peft_methods",),
    "timm": ("timm_models",),
    "torchvision": ("torchvision_models",),
    "diffusers": ("diffusers_models",),
    "graphs": ("graphs",),
    "misc": ("misc",),
    "layers": ("layers",),
}


def main() -> int:
    """Examine what the options choose; 1 if anything was wrong, foreign or too slow."""
    options = _options()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    jobs, missing = _jobs(options)
    if options.list:
        print("\n".join(f"{name} [{relation}]" for _, name, relation in jobs))
        return 0
    findings = list(_found(options.findings) if options.findings else _kept(_examined(jobs, options), options.json))
    _say(findings, missing)
    if options.docs is not None:
        from zoo import page

        page.write(options.docs, findings, missing, asked=len(jobs))
    bad = {"wrong", "foreign exception", "too slow"}
    return 1 if any(f.verdict.value in bad for f in findings) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m zoo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="models whose name holds this text; exactly this name if it begins with =")
    parser.add_argument("--family", action="append", choices=list(_FAMILIES), help="may be given several times; all by default")
    parser.add_argument("--relation", action="append", help="relations of batch, length and width (usual, B=T, T=1, ...)")
    parser.add_argument("--docs", type=Path, default=None, help="page whose tables are replaced")
    parser.add_argument("--json", type=Path, default=None, help="file for all findings, one a line")
    parser.add_argument(
        "--findings", type=Path, nargs="+", default=None, help="files that --json wrote, later ones first to be believed"
    )
    parser.add_argument("--limit", type=int, default=60, help="seconds for one comparison")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="only say what would be tried")
    parser.add_argument("--traceback", action="store_true", help="let errors through, to see where they come from")
    return parser.parse_args()


def _jobs(options: argparse.Namespace) -> tuple[list[tuple[str, str, str]], dict[str, str]]:
    """(module, name, relation) of all that was asked for, and the families that cannot be tried here."""
    jobs: list[tuple[str, str, str]] = []
    missing: dict[str, str] = {}
    for family in options.family or _FAMILIES:
        for module in _FAMILIES[family]:
            try:
                made = list(import_module(f"zoo.{module}").specimens())
            except ImportError as error:
                missing[family] = f"{error.name or error} is not installed"
                continue
            for specimen in made:
                if _chosen(specimen.name, options.only):
                    relations = [r for r in specimen.relations if not options.relation or r in options.relation]
                    jobs += [(module, specimen.name, relation) for relation in relations]
    return jobs, missing


def _chosen(name: str, only: str) -> bool:
    short = name.partition("/")[2].lower()
    return short == only[1:].lower() if only.startswith("=") else only.lower() in name.lower()


def _examined(jobs: list[tuple[str, str, str]], options: argparse.Namespace) -> Iterable:
    if options.processes == 1:
        for job in jobs:
            yield _told(_examine(job, options.limit, options.traceback))
        return
    with ProcessPoolExecutor(options.processes) as pool:
        waiting = [pool.submit(_examine, job, options.limit, False) for job in jobs]
        for one in waiting:
            yield _told(one.result())


def _kept(findings: Iterable, file: Path | None) -> Iterable:
    """Each is written to ``file`` as soon as it is there: a long run that is cut short leaves what it found."""
    if file is None:
        yield from findings
        return
    with file.open("w", encoding="utf-8", buffering=1) as lines:
        for finding in findings:
            lines.write(json.dumps({**vars(finding), "verdict": finding.verdict.value}) + "\n")
            yield finding


def _found(files: list[Path]) -> Iterable:
    from zoo.examine import Finding, Verdict

    kept = {}  # the last word on each
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            kept[found["name"], found["relation"]] = Finding(**{**found, "verdict": Verdict(found["verdict"])})
    return kept.values()


def _examine(job: tuple[str, str, str], limit: int, traceback: bool):
    import torch

    from zoo.examine import examine

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    module, name, relation = job
    specimen = next(s for s in import_module(f"zoo.{module}").specimens() if s.name == name)
    return examine(specimen, relation, limit=limit, reraise=traceback)


def _told(finding):
    number = f"error {finding.error:.1e}, {finding.ratio} x plain" if finding.error == finding.error else finding.message[:300]
    print(f"{finding.verdict.value:28} {finding.name} [{finding.relation}] {finding.seconds:.1f} s: {number}", flush=True)
    return finding


def _say(findings: list, missing: dict[str, str]) -> None:
    from zoo.page import count

    for family, verdicts in count(findings).items():
        print(f"{family}: " + ", ".join(f"{number} {verdict.value}" for verdict, number in verdicts.most_common()))
    for family, reason in missing.items():
        print(f"{family}: not tried, {reason}")


if __name__ == "__main__":
    sys.exit(main())
