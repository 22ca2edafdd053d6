"""Likelihoods against those of the harness's own Hugging Face model, as it computed them once."""

import json

import pytest
from parity.harness_scores import NUM_REQUESTS, RECORDING, instances, requests, write_checkpoint

from refusion_jax.evaluation.harness import RefusionLM


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = write_checkpoint(tmp_path_factory.mktemp("recorded"))
    # Trained as ReFusion, read as any other decoder: from left to right.
    model = RefusionLM(str(directory), method="autoregressive", allow_objective="unknown")
    return model.loglikelihood(instances(requests()))


def test_likelihoods_are_the_harnesss_own(found):
    recorded = json.loads(RECORDING.read_text())
    assert [(each["context"], each["continuation"]) for each in recorded] == requests()
    assert len(recorded) == NUM_REQUESTS == 50
    assert [value for value, _ in found] == pytest.approx([each["value"] for each in recorded], abs=1e-3)
    assert [greedy for _, greedy in found] == [each["is_greedy"] for each in recorded]
    assert {each["is_greedy"] for each in recorded} == {True, False}
