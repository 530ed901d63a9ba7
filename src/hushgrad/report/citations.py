"""Citations: BibTeX for exactly what a plan uses. One table from class names to papers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hushgrad import _check
from hushgrad._value import Value
from hushgrad.accounting.api import accountant_of
from hushgrad.accounting.base import Accountant
from hushgrad.report.papers import PAPERS
from hushgrad.train.plan import Plan

__all__ = ["USED_BY", "citation", "papers_of"]


# class name -> the papers behind it. Every public mechanism, denoiser, clipper, sampler, average and accountant has a line.
USED_BY: dict[str, tuple[str, ...]] = {
    # noise
    "AntiPGD": ("kalinin2026lambda", "orvieto2022anticorrelated"),
    "BLT": ("dvijotham2024efficient", "denisov2022improved"),
    "Banded": ("choquette2023amplified", "kalinin2024banded"),
    "BandedInverse": ("kalinin2026back",),
    "Dense": ("denisov2022improved",),
    "Independent": ("abadi2016deep",),
    "Nu": ("choquette2024correlated",),
    "Spectral": ("choquette2024correlated",),
    "Toeplitz": ("fichtenberger2023constant",),
    "Tree": ("kairouz2021practical", "honaker2015efficient"),
    # denoise
    "Chain": ("dwork2014foundations",),
    "DebiasedSecondMoment": ("tang2024adambc",),
    "ExponentialAverage": ("zhang2024doppler",),
    "JamesStein": ("balle2018improving",),
    "Kalman": ("zhang2024disk",),
    "Laplacian": ("wang2020lssgd",),
    "LowPass": ("zhang2024doppler",),
    "SVRG": ("johnson2013accelerating", "wang2017empirical"),
    "SoftThreshold": ("balle2018improving", "donoho1995denoising"),
    # clipping
    "Adaptive": ("andrew2021adaptive",),
    "Automatic": ("bu2023automatic",),
    "Flat": ("abadi2016deep",),
    "PerLayer": ("mcmahan2018learning",),
    # sampling
    "BallsInBins": ("chua2025balls",),
    "CyclicPoisson": ("choquette2023amplified",),
    "FixedSize": ("balle2018subsampling",),
    "FullBatch": ("bassily2014private",),
    "Poisson": ("abadi2016deep",),
    "RoundRobin": ("kairouz2021practical",),
    "TruncatedPoisson": ("chua2024scalable",),
    # averaging and projection
    "EMA": ("de2022unlocking",),
    "Polyak": ("polyak1992acceleration",),
    "Tail": ("rakhlin2012making",),
    "Ball": ("bassily2014private",),
    "Box": ("bassily2014private",),
    # tuning
    "RepeatAndSelect": ("papernot2022tuning",),
    # accounting
    "Advanced": ("kairouz2015composition",),
    "Basic": ("dwork2014foundations",),
    "GDP": ("dong2022gaussian",),
    "Optimal": ("kairouz2015composition", "murtagh2016complexity"),
    "PLD": ("sommer2019privacy", "doroshenko2022connect"),
    "RDP": ("mironov2017renyi", "mironov2019sampled", "canonne2020discrete"),
    "ZCDP": ("bun2016concentrated", "canonne2020discrete"),
}


def citation(plan: Plan, *, accountant: str | Accountant = "pld") -> str:
    """BibTeX for exactly what ``plan`` uses: its mechanism, sampling, clipping, denoising, averaging and the accountant.

    >>> plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, batch_size=10, dataset_size=100, steps=3)
    >>> [line for line in citation(plan).splitlines() if line.startswith("@")]
    ['@inproceedings{abadi2016deep,', '@article{sommer2019privacy,', '@article{doroshenko2022connect,']
    """
    keys, unknown = papers_of(plan, accountant=accountant)
    # Somebody's own mechanism is used all the same, so its absence from the table is said.
    notes = [f"% {name}: not part of hushgrad; cite its own source." for name in unknown]
    return "\n\n".join([*(PAPERS[key].bibtex(key) for key in keys), *notes]) + "\n"


def papers_of(plan: Plan, *, accountant: str | Accountant = "pld") -> tuple[list[str], list[str]]:
    """(keys of the papers behind a plan, each once, in the order of use; names of classes that the table does not know)."""
    names = [*_parts(_check.instance(Plan, plan=plan)), type(accountant_of(accountant)).__name__]
    keys = [key for name in names for key in USED_BY.get(name, ())]
    return list(dict.fromkeys(keys)), [name for name in dict.fromkeys(names) if name not in USED_BY]


def _parts(value: Value) -> Iterator[str]:
    """Class names of everything inside a value, however deep (a chain holds several denoisers)."""
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        held = getattr(value, field.name)
        for item in held if isinstance(held, tuple) else (held,):
            if isinstance(item, Value):
                yield type(item).__name__
                yield from _parts(item)
