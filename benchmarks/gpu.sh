#!/bin/sh
# What this package does on one GPU, in about six minutes; --small tries it out on a CPU, in longer. Needs Python 3.11 or newer
# with jax (for a GPU jax[cuda12] or jax[cuda13]), flax, optax, orbax-checkpoint, sentencepiece and numpy; installs nothing.
#
#     sh benchmarks/gpu.sh
#     PYTHON=python3.12 sh benchmarks/gpu.sh --output=h100.json
set -eu
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu.py" "$@"
