"""Evaluation through EleutherAI's lm-evaluation-harness, and what it needs: settings, speed, safely run code."""

NAME = "refusion_jax"  # what the harness calls this package's model, and our part of its results
