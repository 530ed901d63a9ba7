"""Everything public names its papers, and a plan's bibliography is exactly what it uses."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from hushgrad import _papers, accounting, clipping, denoise, estimators, noise, sampling
from hushgrad.accounting import Accountant
from hushgrad.clipping import Clipper, Flat
from hushgrad.denoise import Chain, Denoiser, JamesStein, Laplacian
from hushgrad.errors import ArgumentError
from hushgrad.estimators import DPEstimator
from hushgrad.events import RepeatAndSelect
from hushgrad.noise import BLT, Mechanism
from hushgrad.report import Paper, citation
from hushgrad.report.citations import papers_of
from hushgrad.sampling import Sampler
from hushgrad.testing import members
from hushgrad.train import Plan
from hushgrad.train.after.averaging import Average
from hushgrad.train.after.projection import Projection

ROOMS = [
    (noise, Mechanism),
    (denoise, Denoiser),
    (clipping, Clipper),
    (sampling, Sampler),
    (accounting, Accountant),
    (estimators, DPEstimator),
]
AFTER = [kind for base in (Average, Projection) for kind in base.__subclasses__() if kind.__module__.startswith("hushgrad")]
PUBLIC = [kind for room, base in ROOMS for kind in members(room, base).values()] + AFTER
PAPERS = sorted({paper for kind in [*PUBLIC, RepeatAndSelect] for paper in kind.papers})
SETTING = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 10, "dataset_size": 100}


@pytest.mark.parametrize("kind", PUBLIC)
def test_every_public_class_names_its_papers(kind):
    assert vars(kind).get("papers"), f"{kind.__name__} names no paper"


def test_one_key_for_one_paper():
    assert len(PUBLIC) > 35 and len(AFTER) >= 5
    assert len({paper.key for paper in PAPERS}) == len(PAPERS) > 40
    assert {paper for paper in vars(_papers).values() if isinstance(paper, Paper)} <= set(PAPERS)  # none that nothing uses


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.key)
def test_entries_are_bibtex(paper):
    entry = paper.bibtex()
    assert re.match(r"@(article|inproceedings|misc)\{[a-z0-9]+,\n", entry)
    assert entry.count("{") == entry.count("}")
    assert re.search(r"year = \{(19|20)\d\d\}", entry) and paper.year in range(1950, 2027)
    assert not paper.arxiv or re.fullmatch(r"\d{4}\.\d{4,5}", paper.arxiv)


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
    assert "% Foreign: names no paper" in citation(plan)


def test_a_plan_is_needed():
    with pytest.raises(ArgumentError, match="plan="):
        citation("DP-SGD")  # type: ignore[arg-type]
