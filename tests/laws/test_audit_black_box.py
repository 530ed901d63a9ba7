"""Exposure, membership inference, example canaries, inversion: their laws, and attacks that must succeed where there is something."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from hushgrad import audit
from hushgrad.errors import ArgumentError

losses = st.lists(st.floats(0, 50), min_size=1, max_size=40)


@given(losses, st.floats(0, 50))
def test_exposure_is_the_rank(references: list[float], secret: float) -> None:
    (found,) = audit.exposure([secret], references)
    below, ties = sum(r < secret for r in references), sum(r == secret for r in references)
    assert found == pytest.approx(math.log2(len(references) + 1) - math.log2(1 + below + ties / 2))
    assert -1e-12 <= found <= math.log2(len(references) + 1)


@given(st.integers(1, 30), st.integers(2, 5), st.integers(3, 50), st.integers(0, 5))
@settings(max_examples=30)
def test_secrets_are_distinct_and_start_with_the_prefix(count: int, length: int, vocabulary: int, seed: int) -> None:
    if count > vocabulary**length:
        return
    found = audit.secret_sequences(count, length=length, vocabulary=vocabulary, prefix=[1, 2], seed=seed)
    assert len({tuple(row) for row in found.tolist()}) == count
    assert (found[:, :2] == torch.tensor([1, 2])).all() and int(found.max()) < max(vocabulary, 3)


def test_a_memorised_secret_is_exposed_and_an_unknown_one_is_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 32), nn.Linear(32, 12))  # a bigram model
    secrets = audit.secret_sequences(1, length=5, vocabulary=12, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    references = audit.sequence_losses(model, audit.secret_sequences(2000, length=5, vocabulary=12, seed=2))
    before = audit.exposure(audit.sequence_losses(model, secrets), references)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(secrets[:, :-1]).transpose(1, 2), secrets[:, 1:]).backward()
        optimizer.step()
    references = audit.sequence_losses(model, audit.secret_sequences(2000, length=5, vocabulary=12, seed=2))
    after = audit.exposure(audit.sequence_losses(model, secrets), references)
    assert after[0] > 7.0 > 5.0 > before[0]


def world(seed: int, effect: float, models: int = 40, n: int = 2000) -> dict[str, np.ndarray]:
    """Losses of a target and of reference models in which being a member lowers an example's own loss by ``effect``."""
    rng = np.random.default_rng(seed)
    hardness, inside = rng.normal(0, 2, n), rng.random((models + 1, n)) < 0.5
    logits = hardness + effect * inside + rng.normal(size=inside.shape)
    found = np.log1p(np.exp(-logits))
    return {
        "losses": found[0],
        "members": inside[0],
        "reference_losses": found[1:],
        "reference_members": inside[1:],
    }


@pytest.mark.parametrize("method", ["loss", "lira", "rmia"])
def test_no_effect_is_no_attack_and_references_help(method: str) -> None:
    """Under no effect the AUC of 1,000 against 1,000 has a standard deviation of 0.013: 0.05 is passed with probability 1e-4."""
    none, some = (audit.membership_inference(**world(0, effect), method=method) for effect in (0.0, 1.5))
    assert abs(none.auc - 0.5) < 0.05
    assert none.true_positive_low <= none.true_positive_rate <= none.true_positive_high
    assert some.false_positive_rate <= 0.001
    if method == "loss":
        assert some.auc < 0.75
    else:
        assert some.auc > 0.8
    assert "a stronger attack may find more" in str(some)


def test_few_and_one_sided_references_still_work() -> None:
    data = world(1, 2.0, models=6)
    assert audit.membership_inference(**data).auc > 0.8
    offline = {**data, "reference_members": np.zeros_like(data["reference_members"]), "reference_losses": None}
    rng = np.random.default_rng(5)
    hardness = np.random.default_rng(1).normal(0, 2, 2000)
    offline["reference_losses"] = np.log1p(np.exp(-(hardness + rng.normal(size=(6, 2000)))))
    for method in ("lira", "rmia"):
        assert audit.membership_inference(**offline, method=method).auc > 0.8
    assert audit.membership_inference(**world(1, 2.0, models=1)).auc > 0.75  # no example was in and out of the one model


def test_membership_report_is_a_value() -> None:
    report = audit.membership_inference(**world(2, 1.0))
    assert "at 99.9% confidence" in str(audit.membership_inference(**world(2, 1.0), confidence=0.999))  # not "100%"
    assert audit.MembershipReport.from_json(report.to_json()) == report


def test_wrong_attacks_are_refused() -> None:
    with pytest.raises(ArgumentError, match="members"):
        audit.membership_inference([1.0, 2.0], [True, True], method="loss")
    with pytest.raises(ArgumentError, match="reference_losses"):
        audit.membership_inference([1.0, 2.0], [True, False])
    with pytest.raises(ArgumentError, match="k >= 1 models"):
        audit.membership_inference(**world(0, 1.0, models=0))
    with pytest.raises(ArgumentError, match="method"):
        audit.membership_inference([1.0, 2.0], [True, False], method="lyra")
    with pytest.raises(ArgumentError, match="losses"):
        audit.membership_inference([-1.0, 2.0], [True, False], method="loss")
    with pytest.raises(ArgumentError, match="diverged"):
        audit.exposure([math.nan], [1.0, 2.0])


def test_example_canaries_are_injected_by_their_coins() -> None:
    inputs, labels = torch.rand(50, 3), torch.randint(4, (50,))
    for canaries in (
        audit.mislabelled(inputs, labels, classes=4, count=20, seed=3),
        audit.out_of_distribution(inputs, classes=4, count=20, seed=3),
    ):
        joined = canaries.injected_into(TensorDataset(inputs, labels))
        assert len(joined) == 50 + canaries.members.sum()
        assert 0 < canaries.members.sum() < len(canaries) == 20
        x, y = joined[len(joined) - 1]
        last = int(np.flatnonzero(canaries.members)[-1])
        assert torch.equal(x, canaries.inputs[last]) and y == canaries.labels[last]
    with pytest.raises(ArgumentError, match="count"):
        audit.mislabelled(inputs, labels, classes=4, count=51)


def test_a_model_that_memorises_example_canaries_is_bounded_from_below() -> None:
    """Without privacy an over-large model learns noise with random labels by heart; one run then gives epsilon far above 1."""
    torch.manual_seed(0)
    canaries = audit.out_of_distribution(torch.rand(5, 64), classes=4, count=200, seed=0)
    train = canaries.injected_into(TensorDataset(torch.rand(50, 64), torch.randint(4, (50,))))
    x, y = (torch.stack(part) for part in zip(*[train[i] for i in range(len(train))], strict=True))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        scores = -nn.functional.cross_entropy(model(canaries.inputs), canaries.labels, reduction="none")
    assert audit.epsilon_one_run(scores.numpy(), canaries.members, delta=1e-5) > 1.0


def test_inversion_finds_the_classes_of_digits() -> None:
    """The demonstration: a linear classifier of digits, inverted, resembles the mean of each class more than another class's."""
    from hushgrad.recipes.data import DATA

    data = DATA["digits"]()
    x, y = data.train.tensors
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(data.shape), 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    means = [x[y == label].mean(dim=0) for label in range(10)]
    found = [audit.invert(model, label, shape=data.shape, steps=100) for label in range(10)]
    right = sum(int(np.argmax([audit.likeness(image, mean) for mean in means])) == label for label, image in enumerate(found))
    assert right >= 7
