"""Trains a model; see `python train.py --help`."""

from refusion_jax import command_line, train

if __name__ == "__main__":
    command_line.run(train.main, train.FLAGS)
