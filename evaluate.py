"""Evaluates a model on benchmarks; see `python evaluate.py --help`."""

from refusion_jax import command_line, evaluate

if __name__ == "__main__":
    command_line.run(evaluate.main, evaluate.FLAGS, required=("checkpoint", "tasks"))
