"""Draws the training curve of a run from its metrics.jsonl.

    python -m refusion_jax.plot --workdir=runs/gsm8k --output=curve.png

Needs matplotlib (`pip install refusion_jax[plot]`).
"""

from pathlib import Path
from typing import Any

from absl import flags

from refusion_jax import command_line
from refusion_jax.config import ConfigError
from refusion_jax.training.metrics import METRICS_NAME, read_metrics

FLAGS = flags.FlagValues()
flags.DEFINE_string("workdir", None, "Run directory.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "Picture to write; its ending says the format.", flag_values=FLAGS)

_LABELS = {"loss": "total", "ar_loss": "AR, next tokens", "mdm_loss": "MDM, masked tokens"}


def main(args: flags.FlagValues) -> None:
    """Draws with the parsed flags."""
    records = read_metrics(Path(args.workdir))
    if not records:
        raise ConfigError(f"{args.workdir} has no {METRICS_NAME} with records; give a run directory of train.py.")
    try:
        draw_losses(records, Path(args.output))
    except ImportError as error:
        raise ConfigError("matplotlib is not installed; pip install 'refusion_jax[plot]' brings it.") from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"--output {args.output} cannot be written: {error}.") from error
    print(f"{args.output}: {len(records)} records, loss {records[0]['loss']:.3f} -> {records[-1]['loss']:.3f}")


def draw_losses(records: list[dict[str, Any]], output: Path) -> None:
    """Draws the training losses over steps, and the held-out ones as dots of the same colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for name, label in _LABELS.items():
        if name not in records[0]:
            continue
        (line,) = axes.plot([r["step"] for r in records], [r[name] for r in records], label=label, linewidth=1)
        held_out = [record for record in records if f"eval_{name}" in record]
        steps, losses = [r["step"] for r in held_out], [r[f"eval_{name}"] for r in held_out]
        axes.plot(steps, losses, "o", color=line.get_color(), label=f"{label}, held out")
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    command_line.run(main, FLAGS, required=("workdir", "output"))
