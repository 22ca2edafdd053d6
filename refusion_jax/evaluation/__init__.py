"""Evaluation through EleutherAI's lm-evaluation-harness, and what it needs: settings, speed, safely run code."""
