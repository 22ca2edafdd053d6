"""Decodes prompts with a trained model; see `python decode.py --help`."""

from refusion_jax import command_line, decode

if __name__ == "__main__":
    command_line.run(decode.main, decode.FLAGS)
