"""Logits that `transformers` computed for small checkpoints of its own; tests/parity writes and compares more."""

import numpy as np
import pytest
from parity import transformers_models as reference

import refusion_jax as rf

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("name", reference.RECORDED)
def test_recorded_logits(name):
    """Sorted and permuted position IDs, to 2e-4."""
    directory = reference.RECORDINGS / name
    model, recorded = rf.load(directory), np.load(directory / reference.CASE_NAME)
    for order in ("sorted", "permuted"):
        got = rf.logits(model, recorded["tokens"], recorded[f"{order}.position_ids"])
        np.testing.assert_allclose(got, recorded[f"{order}.logits"], atol=2e-4, rtol=0)


def test_sharded_files_are_among_the_recordings():
    assert any((reference.RECORDINGS / name / "model.safetensors.index.json").exists() for name in reference.RECORDED)
