"""Noise that is optimised for what the optimizer makes of it: the form is the error, the search finds the least of it, plans ask for it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy

from hushgrad import Plan
from hushgrad.errors import ArgumentError
from hushgrad.events import CyclicPoisson, MinSep, Once
from hushgrad.noise import BLT, Banded, Dense, PrefixSums, SGDWorkload, Tree
from hushgrad.noise.error import error_form
from hushgrad.noise.power_series import inverse, lower_toeplitz
from hushgrad.recipes import Recipe

WORKLOADS = [
    SGDWorkload(momentum=0.9),
    SGDWorkload(momentum=0.5, weight_decay=0.1),
    SGDWorkload(schedule="linear"),
    SGDWorkload(momentum=0.9, schedule="cosine"),
    SGDWorkload(learning_rate=tuple(1.0 / (1 + t) for t in range(40))),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=repr)
def test_the_form_is_the_error(workload):
    beta = np.random.default_rng(0).normal(size=40)
    B = workload.matrix(40) @ lower_toeplitz(beta)
    assert beta @ error_form(workload, 40, "mean")(beta) == pytest.approx(np.square(B).sum(), rel=1e-9)
    if workload.coefficients(40) is not None:
        assert beta @ error_form(workload, 40, "max")(beta) == pytest.approx(np.square(B).sum(1).max(), rel=1e-9)
    else:
        with pytest.raises(ArgumentError, match="changes from step to step"):
            error_form(workload, 40, "max")


def test_prefix_sums_by_either_way_are_one_optimum():
    for kind in (Banded(bands=8), BLT(buffers=2)):
        usual = kind.resolved(steps=60, participation=Once())
        formed = type(kind)(**{**_open(kind), "workload": PrefixSums()}).resolved(steps=60, participation=Once())
        a, b = (m.error(steps=60, participation=Once()).rmse for m in (usual, formed))
        assert a == pytest.approx(b, rel=1e-6)


def _open(kind):
    return {"bands": 8} if isinstance(kind, Banded) else {"buffers": 2}


@pytest.mark.parametrize("workload", WORKLOADS, ids=repr)
@pytest.mark.parametrize("participation", [Once(), MinSep(gap=10, times=4)], ids=str)
def test_it_is_better_than_noise_for_prefix_sums(workload, participation):
    for usual in (BLT(buffers=3), Banded(bands=10)):
        own = type(usual)(**({"buffers": 3} if isinstance(usual, BLT) else {"bands": 10}), workload=workload)
        rmse = [m.error(steps=40, participation=participation, workload=workload).rmse for m in (usual, own)]
        assert rmse[1] <= rmse[0] * (1 + 1e-6)
        assert own.error(steps=40, participation=participation, workload=workload).gap >= 0
    fixed = Banded(bands=10, workload=workload).resolved(steps=40, participation=participation)
    assert fixed.workload is None and Banded.from_json(fixed.to_json()) == fixed


def test_a_search_without_gradients_finds_nothing_better():
    workload = SGDWorkload(momentum=0.9, schedule="linear")

    def loss(tail):
        c = np.r_[1.0, tail]
        return np.linalg.norm(c) * np.linalg.norm(workload.matrix(12) @ lower_toeplitz(inverse(c, 12)))

    found = scipy.optimize.minimize(loss, np.array([0.5, 0.3]), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12})
    ours = Banded(bands=3, workload=workload).resolved(steps=12, participation=Once())
    assert loss(ours.coefficients[1:]) == pytest.approx(found.fun, rel=1e-7)


def test_ten_per_cent_less_noise_under_momentum():
    """What the page says: 24.01 for noise made for prefix sums, 21.15 for this workload, 19.57 for no mechanism at all."""
    workload = SGDWorkload(momentum=0.9)
    usual, own = (
        m.resolved(steps=1024, participation=Once()).unit_error(steps=1024, workload=workload)[0]
        * m.resolved(steps=1024, participation=Once()).sensitivity(steps=1024, participation=Once())
        for m in (BLT(), BLT(workload=workload))
    )
    assert usual == pytest.approx(24.01, abs=0.01) and own == pytest.approx(21.15, abs=0.01)


def test_plans_and_recipes_ask_for_it():
    about = {"noise_multiplier": 1.0, "delta": 1e-5, "batch_size": 10, "dataset_size": 100, "epochs": 3}
    workload = SGDWorkload(momentum=0.9, schedule="linear")
    plan = Plan.dpftrl(**about, workload=workload)
    assert plan.noise == BLT(workload=workload).resolved(steps=30, participation=MinSep(gap=10, times=3))
    assert plan.noise != Plan.dpftrl(**about).noise and Plan.from_json(plan.to_json()) == plan
    for noise in (Tree(), Banded.square_root(bands=3), Dense.optimal(steps=30)):
        with pytest.raises(ArgumentError, match="to be left out"):
            Plan.dpftrl(**about, noise=noise, workload=workload)

    def made(optimizer, **changes):
        tables = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "optimizer": {"name": "sgd", "lr": 0.1, **optimizer}}
        table = {"method": "dpftrl", **about, "dataset_size": 100, **changes}
        return Recipe.from_tables({**tables, "plan": table}).make_plan(Recipe.from_tables({**tables, "plan": table}).make_data())

    assert made({"momentum": 0.9, "schedule": "linear"}).noise == plan.noise
    assert made({}).noise == made({"momentum": 0.9, "nesterov": True}).noise == Plan.dpftrl(**about).noise
    assert made({"momentum": 0.9}, noise="Tree").noise == Tree().resolved(steps=30, participation=MinSep(gap=10, times=3))
    long = {"dataset_size": 1000, "batch_size": 1, "epochs": 5}
    assert made({"momentum": 0.9, "schedule": "linear"}, **long).noise == made({"momentum": 0.9}, **long).noise


def test_amplified_banded_noise_for_a_workload_keeps_its_theorem():
    workload = SGDWorkload(momentum=0.9)
    noise = Banded(bands=4, workload=workload).resolved(steps=64, participation=CyclicPoisson(period=4, rate=0.1))
    assert str(noise.event(1.0, CyclicPoisson(period=4, rate=0.1), 64)).startswith("16 x Poisson(0.1) Gaussian(")


def test_a_workload_beside_coefficients_is_refused():
    with pytest.raises(ArgumentError, match="not optimised for anything"):
        Banded(bands=2, coefficients=(1.0, 0.5), workload=SGDWorkload())
    with pytest.raises(ArgumentError, match="SGDWorkload"):
        BLT(workload=0.9)
