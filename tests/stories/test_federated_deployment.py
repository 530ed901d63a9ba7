"""The same strategy on Flower's deployment engine: a SuperLink and SuperNodes as processes of this machine, with TLS."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs hushgrad[federated]")
from federated_deployment import APP, deployed

from hushgrad.federated import LocalGrid


@pytest.mark.slow  # eight processes, each of which imports torch
def test_dpftrl_runs_on_a_deployment_with_tls(tmp_path):
    """Bit for bit what it is in one process; the client that sends garbage counts as zero and is counted."""
    log = deployed(tmp_path, clients=3, seconds=500)
    assert (tmp_path / "found.json").exists(), log[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["rounds"], found["accepted"], len(found["rejected"])) == (2, 2, 1)
    assert "cannot be read" in found["rejected"][0]
    story = types.ModuleType("story")
    exec(compile(APP, "story", "exec"), vars(story))
    strategy, weights = story.trained(LocalGrid(story.client, clients=3))
    assert strategy.spent().epsilon == found["epsilon"] and np.isfinite(weights).all()
    np.testing.assert_array_equal(weights, found["weights"])
