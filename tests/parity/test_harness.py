"""Likelihoods against the harness's own Hugging Face model; `make test-parity` installs what it needs."""

import json

import pytest
from parity.harness_scores import RECORDING, hugging_face_scores, instances, requests, write_checkpoint

from refusion_jax.evaluation.harness import RefusionLM

pytestmark = pytest.mark.parity


def test_likelihoods_of_an_autoregressive_model(tmp_path):
    for library in ("torch", "transformers", "accelerate"):
        pytest.importorskip(library)
    directory = write_checkpoint(tmp_path / "checkpoint")
    theirs = hugging_face_scores(directory)
    model = RefusionLM(str(directory), method="autoregressive", allow_objective="unknown")
    ours = model.loglikelihood(instances(requests()))
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-3)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    recorded = [each["value"] for each in json.loads(RECORDING.read_text())]
    assert [value for value, _ in theirs] == pytest.approx(recorded, abs=1e-4)
