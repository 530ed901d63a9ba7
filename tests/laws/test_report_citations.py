"""Everything public has an entry, and a plan's bibliography is exactly what it uses."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

import pytest

from hushgrad import accounting, clipping, denoise, noise, sampling
from hushgrad.accounting import Accountant
from hushgrad.clipping import Clipper, Flat
from hushgrad.denoise import Chain, Denoiser, JamesStein, Laplacian
from hushgrad.errors import ArgumentError
from hushgrad.noise import BLT, Mechanism
from hushgrad.report import citation
from hushgrad.report.citations import USED_BY, papers_of
from hushgrad.report.papers import PAPERS
from hushgrad.sampling import Sampler
from hushgrad.train import Plan
from hushgrad.train.after.averaging import Average
from hushgrad.train.after.projection import Projection

ROOMS = [(noise, Mechanism), (denoise, Denoiser), (clipping, Clipper), (sampling, Sampler), (accounting, Accountant)]
PUBLIC = sorted(
    name
    for room, base in ROOMS
    for name in room.__all__
    if inspect.isclass(vars(room)[name]) and issubclass(vars(room)[name], base) and vars(room)[name] is not base
)
SETTING = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 10, "dataset_size": 100}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_class_has_an_entry(name):
    assert USED_BY.get(name), f"{name} has no line in USED_BY"


def test_averages_and_projections_have_entries():
    kinds = [kind for base in (Average, Projection) for kind in base.__subclasses__() if kind.__module__.startswith("hushgrad")]
    assert len(kinds) >= 5
    assert all(kind.__name__ in USED_BY for kind in kinds)


def test_tables_fit_together():
    used = {key for keys in USED_BY.values() for key in keys}
    assert used == set(PAPERS)  # no dangling key, no paper that nothing uses
    assert len(PUBLIC) > 30


@pytest.mark.parametrize("key", PAPERS)
def test_entries_are_bibtex(key):
    entry = PAPERS[key].bibtex(key)
    assert re.match(r"@(article|inproceedings|misc)\{[a-z0-9]+,\n", entry)
    assert entry.count("{") == entry.count("}")
    assert re.search(r"year = \{(19|20)\d\d\}", entry) and PAPERS[key].year in range(1950, 2027)
    assert not PAPERS[key].arxiv or re.fullmatch(r"\d{4}\.\d{4,5}", PAPERS[key].arxiv)


def keys(plan: Plan, accountant: str = "pld") -> list[str]:
    return re.findall(r"^@\w+\{(\w+),", citation(plan, accountant=accountant), flags=re.MULTILINE)


def test_exactly_what_was_used():
    dpsgd = Plan.dpsgd(steps=3, **SETTING)
    assert keys(dpsgd) == ["abadi2016deep", "sommer2019privacy", "doroshenko2022connect"]
    assert "mironov2017renyi" in keys(dpsgd, "rdp") and "sommer2019privacy" not in keys(dpsgd, "rdp")
    chained = Plan.dpftrl(epochs=1, noise=BLT(buffers=2), denoise=Chain((JamesStein(), Laplacian(1.0))), **SETTING)
    assert {"dvijotham2024efficient", "kairouz2021practical", "wang2020lssgd", "balle2018improving"} <= set(keys(chained))
    assert len(keys(chained)) == len(set(keys(chained)))


def test_a_foreign_part_is_named_not_forgotten():
    @dataclass(frozen=True)
    class Foreign(Flat):
        pass

    plan = Plan.dpsgd(steps=3, clip=Foreign(1.0), **SETTING)
    assert papers_of(plan)[1] == ["Foreign"]
    assert "% Foreign: not part of hushgrad" in citation(plan)


def test_a_plan_is_needed():
    with pytest.raises(ArgumentError, match="plan="):
        citation("DP-SGD")  # type: ignore[arg-type]
