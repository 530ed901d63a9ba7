"""Sampling of users against sampling of examples: every plan meets a user's budget, and the ranking follows the stated model."""

from __future__ import annotations

import pytest

from hushgrad.accounting import calibrate_noise, epsilon
from hushgrad.errors import ArgumentError
from hushgrad.planner import compare_users

ASKED = {"epsilon": 4.0, "delta": 1e-5, "users": 400, "per_user": 4, "batch_size": 40, "steps": 20}


@pytest.fixture(scope="module")
def found():
    return {within: compare_users(**ASKED, within=within) for within in (0.0, 1.0)}


def test_every_plan_meets_the_budget_of_one_user(found):
    for one in found[0.0]:
        assert 3.9 < epsilon(one.event, delta=1e-5) <= 4.0
        assert one.plan.noise_multiplier > 0


def test_users_are_clipped_and_sampled_as_the_table_says(found):
    by_name = {one.name: one for one in found[1.0]}
    two = by_name["users, 2 examples each"].plan
    assert two.unit == "user" and two.batch_size == 20 and two.sampler.rate == pytest.approx(20 / 400)
    exact = calibrate_noise(epsilon=4.0, delta=1e-5, steps=20, rate=20 / 400)
    assert two.noise_multiplier == pytest.approx(exact, rel=2e-3)
    assert two.clip.max_grad_norm == pytest.approx(2 * 0.5**0.5)
    four = by_name["examples, at most 4 of a user"].plan
    assert four.unit == "example" and four.batch_size == 40 and four.sampler.rate == pytest.approx(40 / 1600)
    assert "examples, at most 1 of a user" not in by_name  # the same as users with one each


def test_alike_examples_are_better_spread_over_users(found):
    """If a user's examples say the same, several of them are a waste; if they differ, they average out."""
    users = {within: {one.cap: one.noise for one in rows if one.plan.unit == "user"} for within, rows in found.items()}
    assert users[0.0][1] < users[0.0][2] < users[0.0][4]
    assert users[1.0][4] < users[0.0][4]
    assert all(rows[0].relative == 1 and rows == sorted(rows, key=lambda one: one.noise) for rows in found.values())


@pytest.mark.parametrize("bad", [{"within": 1.5}, {"users": 0}, {"batch_size": 10**6}, {"epsilon": -1.0}])
def test_bad_questions_are_refused(bad):
    with pytest.raises(ArgumentError):
        compare_users(**{**ASKED, **bad})
