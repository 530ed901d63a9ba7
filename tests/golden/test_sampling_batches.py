"""Batches that were dealt once are dealt again: a resumed run relies on it.

Source: this library, 0.1.0, with numpy 2.4. numpy may change the streams of its distributions between versions; a failure here
after an upgrade means that runs interrupted before it cannot be resumed after it, and has to be said in the release notes.
"""

from __future__ import annotations

import hashlib

import pytest

from hushgrad import events, sampling

DRAWS = sampling.Draws(bytes(range(32)))


@pytest.mark.parametrize(
    "sampler, step_four",
    [
        (sampling.Poisson(rate=0.1, steps=5), [2, 3]),
        (sampling.TruncatedPoisson(rate=0.3, size=6, dataset_size=50, steps=5), [0, 2, 3, 4, 5, 31]),
        (sampling.FixedSize(size=5, dataset_size=50, steps=5), [2, 3, 19, 33, 48]),
        (sampling.CyclicPoisson(period=3, rate=0.3, steps=5), [0, 1, 38]),
        (sampling.RoundRobin(batch_size=7, dataset_size=50), [6, 8, 13, 26, 32, 35, 45]),
        (sampling.BallsInBins(bins=9), [16, 24, 35, 38]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_step_four(sampler, step_four):
    assert sampler.dealer(50, DRAWS)(4).tolist() == step_four


def test_each_step_has_its_own_philox_key():
    """The key of step t is BLAKE2b(run key; "step", t), as the docstring of Draws says: computed here by hand."""
    for step in (0, 1, 2**40):
        label = b"step" + step.to_bytes(8, "little")
        digest = hashlib.blake2b(label, digest_size=16, key=bytes(range(32)), person=b"hushgrad/deal").digest()
        key = DRAWS.at(step).bit_generator.state["state"]["key"]
        assert key.tolist() == [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")]


def test_what_is_not_said():
    """One epoch of one deal; promises do not change with a default."""
    plain = sampling.BallsInBins(bins=9)
    assert plain.participation() == events.BallsInBins(bins=9, epochs=1, fresh=False) and plain.steps == 9
