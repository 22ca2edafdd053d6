"""Time and memory of the training loss, value and gradient: whole logits against chunks of positions.

    python benchmarks/loss.py
    python benchmarks/loss.py --positions=4096 --width=1024 --dtype=bfloat16 --chunks=0,256,1024

The plain version unembeds all positions and lets JAX differentiate the cross-entropy. "Chunk 0" is our rule, which
computes the gradient in the forward pass, on all positions at once. Temporary memory is what the compiled program asks
for besides its inputs and outputs, as a share of the float32 logits. A machine's speed drifts, so the versions take
turns, and times are compared within rounds. Prints a table; --output gets the same figures as JSON.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script finds its own directory only

from benchmarks import common
from benchmarks.common import of, spread
from refusion_jax import command_line
from refusion_jax.config import ConfigError
from refusion_jax.files import write_json
from refusion_jax.objectives import weighted_cross_entropy
from refusion_jax.slots import NO_TARGET

FLAGS = flags.FlagValues()
flags.DEFINE_integer("positions", 1024, "Positions of the batch.", 1, flag_values=FLAGS)
flags.DEFINE_integer("width", 256, "Width of the hidden states.", 1, flag_values=FLAGS)
flags.DEFINE_integer("vocabulary", 151_936, "Size of the vocabulary.", 2, flag_values=FLAGS)
flags.DEFINE_float("targets", 1.0, "Share of the positions that have a target.", 0.0, 1.0, flag_values=FLAGS)
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of the hidden states.", flag_values=FLAGS)
flags.DEFINE_list("chunks", ["0", "64", "128", "256", "512"], "Positions per chunk, to be compared.", flag_values=FLAGS)
flags.DEFINE_integer("rounds", 5, "Rounds to measure.", 1, flag_values=FLAGS)
flags.DEFINE_string("output", None, "Default: benchmarks/results/loss_BACKEND.json.", flag_values=FLAGS)

Loss = Callable[..., jax.Array]


@dataclasses.dataclass
class Version:
    """One way to compute the loss: the compiled function, the memory it needs, seconds of each round."""

    name: str
    compiled: Any
    temporary_bytes: int
    seconds: list[float] = dataclasses.field(default_factory=list)

    def measure(self, inputs: tuple[jax.Array, ...]) -> None:
        """Computes value and gradients once."""
        began = time.perf_counter()
        jax.block_until_ready(self.compiled(*inputs))
        self.seconds.append(time.perf_counter() - began)


def plain_loss(hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted cross-entropy of whole logits."""
    logits = jnp.matmul(hidden, unembedding.astype(hidden.dtype), preferred_element_type=jnp.float32)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    return jnp.sum(weights * jnp.where(targets == NO_TARGET, 0.0, losses))


def chunked_loss(chunk: int) -> Loss:
    """Our loss in chunks of so many positions."""

    def loss(*inputs: jax.Array) -> jax.Array:
        return weighted_cross_entropy(*inputs, vocab_axis=1, chunk=chunk)[0]

    return loss


def compile_version(name: str, loss: Loss, inputs: tuple[jax.Array, ...]) -> Version:
    """Compiles a loss with the gradients of hidden states and output embedding."""
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*inputs).compile()
    return Version(name, compiled, compiled.memory_analysis().temp_size_in_bytes)


def make_inputs(args: flags.FlagValues) -> tuple[jax.Array, ...]:
    """Random hidden states, output embedding, targets and weights."""
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (args.positions, args.width), args.dtype)
    unembedding = 0.02 * jax.random.normal(keys[1], (args.width, args.vocabulary))
    targets = jax.random.randint(keys[2], (args.positions,), 0, args.vocabulary)
    has_target = jax.random.uniform(keys[3], (args.positions,)) < args.targets
    weights = jnp.full((args.positions,), 1 / args.positions)
    return hidden, unembedding, jnp.where(has_target, targets, NO_TARGET), weights


def parse_chunks(texts: list[str]) -> list[int]:
    """The chunk sizes of the command line.

    Raises:
      ConfigError: for one that is no whole number of at least 0.
    """
    for text in texts:
        if not text.isdigit():
            raise ConfigError(f"--chunks holds {text!r}; give whole numbers of at least 0, separated by commas.")
    return [int(text) for text in texts]


def figures(version: Version, plain: Version, logits_bytes: int) -> dict[str, Any]:
    """What is reported of a version."""
    ratios = [ours / theirs for ours, theirs in zip(version.seconds, plain.seconds, strict=True)]
    return {
        "version": version.name,
        "milliseconds": spread([1e3 * seconds for seconds in version.seconds]),
        "time_to_plain": spread(ratios),
        "temporary_mib": version.temporary_bytes / 2**20,
        "share_of_logits": version.temporary_bytes / logits_bytes,
    }


def main(args: flags.FlagValues) -> None:
    """Measures, prints and writes the result."""
    chunks, output = parse_chunks(args.chunks), common.result_path(args.output, "loss")
    result: dict[str, Any] = {"commit": common.commit(), "machine": common.machine()}
    common.warn_if_busy(result["machine"])
    inputs = make_inputs(args)
    versions = [compile_version("plain", plain_loss, inputs)]
    versions += [compile_version(f"chunk {chunk}", chunked_loss(chunk), inputs) for chunk in chunks]
    for number in range(args.rounds + 1):
        for version in versions:
            version.measure(inputs)
            if number == 0:
                version.seconds.clear()  # the first run touches new memory
    describe = functools.partial(figures, plain=versions[0], logits_bytes=4 * args.positions * args.vocabulary)
    rows = [describe(version) for version in versions]
    header = ["version", "ms: median (min to max)", "time to plain's", "temporary, MiB", "share of the logits"]
    cells = [
        [
            row["version"],
            of(row["milliseconds"], ",.1f"),
            of(row["time_to_plain"], ".2f"),
            f"{row['temporary_mib']:,.1f}",
            f"{row['share_of_logits']:.1%}",
        ]
        for row in rows
    ]
    print(common.table(header, cells))
    names = ("positions", "width", "vocabulary", "targets", "dtype", "rounds")
    result |= {"versions": common.versions(), "settings": {name: getattr(args, name) for name in names}, "rows": rows}
    result["peak_rss_mib"] = common.peak_rss_mib()
    write_json(output, result)
    print(f"\nWritten to {output}.")


if __name__ == "__main__":
    command_line.run(main, FLAGS)
