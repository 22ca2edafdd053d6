"""A training run from configuration to checkpoint."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from refusion_jax.config import Config, ConfigError
from refusion_jax.data import Dataset, Tokenizer, iterate, load_dataset, make_batches
from refusion_jax.modeling import Transformer
from refusion_jax.sharding import batch_sharding, check_mesh, make_mesh
from refusion_jax.slots import batch_from_arrays
from refusion_jax.training.checkpoint import TOKENIZER_NAME, Checkpoints, claim_workdir, write_json
from refusion_jax.training.evaluation import held_out_answers, held_out_loss
from refusion_jax.training.metrics import MetricsWriter
from refusion_jax.training.state import TrainState, init_state, learning_rate_schedule, make_optimizer
from refusion_jax.training.step import Metrics, make_eval_loss, make_train_step

SUMMARY_NAME = "summary.json"


def resolve(config: Config, tokenizer: Tokenizer) -> Config:
    """Fills in what the tokenizer decides: special tokens, and the vocabulary's size where it is 0.

    Raises:
      ConfigError: when the configured vocabulary is too small for the tokenizer.
    """
    if 0 < config.model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size}, too small for the tokenizer's {tokenizer.vocab_size} "
            "tokens; use 0 to take the tokenizer's."
        )
    model = dataclasses.replace(
        config.model,
        vocab_size=config.model.vocab_size or tokenizer.vocab_size,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_ids=(tokenizer.eos_token_id,),
        mask_token_id=tokenizer.mask_token_id,
    )
    return dataclasses.replace(config, model=model)


def train(config: Config, workdir: Path) -> None:
    """Trains a model on all devices, or continues the run that `workdir` holds.

    Raises:
      ConfigError, DataError, WorkdirError, CheckpointError: for input that cannot be used, before the first step.
    """
    began = time.perf_counter()
    mesh = make_mesh(config.mesh)
    check_mesh(mesh, config.model, config.train.batch_size)
    tokenizer_path = workdir / TOKENIZER_NAME
    tokenizer = Tokenizer.load(tokenizer_path) if tokenizer_path.exists() else None
    dataset = load_dataset(config.data, seed=config.train.seed, tokenizer=tokenizer)
    config = resolve(config, dataset.tokenizer)
    claim_workdir(workdir, config)
    dataset.tokenizer.save(tokenizer_path)

    module = Transformer(config.model)
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    state, shardings = init_state(module, optimizer, config.train.seed, mesh)
    checkpoints = Checkpoints(workdir, config.checkpoint)
    try:
        state = checkpoints.restore(state)
        if int(state.step) >= config.train.steps:
            print(f"{workdir} has already been trained for {config.train.steps:,} steps.")
            return
        _announce(config, dataset, state)
        run = _Run(config, workdir, dataset, module, mesh, checkpoints, began)
        run.train_step = make_train_step(module, optimizer, config.slots, mesh, shardings)
        run.eval_loss = make_eval_loss(module, config.slots, mesh, shardings)
        with jax.set_mesh(mesh):
            run.train(state)
    finally:
        checkpoints.close()


def _announce(config: Config, dataset: Dataset, state: TrainState) -> None:
    """Prints what is about to be trained on what, with everything that was dropped."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    read, tokenized = dataset.counts.read, dataset.counts.train
    dropped = {
        "too long": tokenized.too_long,
        "empty prompt": read.empty_prompt,
        "empty response": read.empty_response,
        "no tokens": tokenized.empty,
    }
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items() if count)
    print(f"Model: {parameters:,} parameters, vocabulary {config.model.vocab_size}, on {jax.device_count()} device(s).")
    print(
        f"Data: {len(dataset.train):,} training and {len(dataset.held_out):,} held-out examples, "
        f"{dataset.train.lengths.mean():.0f} tokens on average; dropped: {reasons or 'none'}."
    )
    if int(state.step):
        print(f"Continuing from step {int(state.step):,}.")


@dataclasses.dataclass
class _Interval:
    """What happened since the last record: training seconds, of these spent waiting for data, and useful tokens."""

    seconds: float = 0.0
    waited: float = 0.0
    tokens: int = 0


class _Run:
    """The loop over steps and its bookkeeping."""

    train_step: Any
    eval_loss: Any

    def __init__(
        self,
        config: Config,
        workdir: Path,
        dataset: Dataset,
        module: Transformer,
        mesh: Mesh,
        checkpoints: Checkpoints,
        began: float,
    ):
        self.config, self.workdir, self.dataset, self.module = config, workdir, dataset, module
        self.mesh, self.checkpoints, self.began = mesh, checkpoints, began
        self.learning_rate = learning_rate_schedule(config.optimizer, config.train.steps)

    def train(self, state: TrainState) -> None:
        """Trains from the state's step to the last, writing records and checkpoints, then the summary."""
        config, start = self.config.train, int(state.step)
        batches = make_batches(self.config.data, self.dataset.train, seed=config.seed, batch_size=config.batch_size)
        reader = iterate(batches, start, read_threads=self.config.data.read_threads, prefetch=self.config.data.prefetch)
        writer = MetricsWriter(self.workdir, start, config.steps)
        with contextlib.closing(reader), contextlib.closing(writer):
            self._loop(state, reader, writer)

    def _loop(self, state: TrainState, reader: Iterator[dict[str, np.ndarray]], writer: MetricsWriter) -> None:
        config, start = self.config.train, int(state.step)
        seed = jnp.int32(config.seed)
        seconds_before = writer.last.get("seconds", 0.0)
        total, interval, compile_seconds = _Interval(), _Interval(), 0.0
        since = time.perf_counter()
        for step in range(start + 1, config.steps + 1):
            asked = time.perf_counter()
            arrays = next(reader)
            interval.waited += time.perf_counter() - asked
            batch = jax.device_put(batch_from_arrays(arrays), batch_sharding(self.mesh))
            state, metrics = self.train_step(state, batch, seed)
            interval.tokens += int(np.count_nonzero(arrays["segment_ids"]))
            writer.advance()
            if step == start + 1:
                # The first step compiles, which belongs in no rate.
                jax.block_until_ready(metrics)
                compile_seconds, interval, since = time.perf_counter() - since, _Interval(), time.perf_counter()
            evaluating = step == config.steps or (config.eval_every > 0 and step % config.eval_every == 0)
            if evaluating or step % config.log_every == 0:
                jax.block_until_ready(metrics)
                interval.seconds = time.perf_counter() - since
                record = self._record(step, metrics, interval)
                if evaluating:
                    record |= self.evaluate(state)
                record["seconds"] = seconds_before + time.perf_counter() - self.began
                writer.write(record)
                total = _Interval(
                    *map(sum, zip(dataclasses.astuple(total), dataclasses.astuple(interval), strict=True))
                )
                interval, since = _Interval(), time.perf_counter()
            if step == config.steps or step % self.config.checkpoint.save_every == 0:
                self.checkpoints.save(state)
        self.checkpoints.close()
        seconds = seconds_before + time.perf_counter() - self.began
        self._summarise(writer.last, total, compile_seconds, seconds)

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Held-out loss and exact match with the parameters of `state`; nothing without held-out examples."""
        if not len(self.dataset.held_out):
            return {}
        losses = held_out_loss(self.eval_loss, state.params, self.dataset, self.config)
        count = self.config.train.eval_decode_examples
        return losses | held_out_answers(self.module, state.params, self.dataset, self.config.decode, count)

    def _record(self, step: int, metrics: Metrics, interval: _Interval) -> dict[str, float]:
        values = jax.device_get(metrics)
        return {
            "step": step,
            "loss": float(values.loss.total),
            "ar_loss": float(values.loss.ar),
            "mdm_loss": float(values.loss.mdm),
            "learning_rate": float(self.learning_rate(step - 1)),
            "grad_norm": float(values.grad_norm),
            **_rates(interval),
        }

    def _summarise(self, last: dict[str, Any], total: _Interval, compile_seconds: float, seconds: float) -> None:
        summary = last | _rates(total) | {"compile_seconds": compile_seconds, "train_seconds": seconds}
        del summary["seconds"]
        write_json(self.workdir / SUMMARY_NAME, summary)
        rates = f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['data_wait_share']:.1%} of it waiting for data"
        print(f"Trained {last['step']:,} steps in {seconds:.0f} s: {rates}, loss {last['loss']:.3f}.")


def _rates(interval: _Interval) -> dict[str, float]:
    seconds = max(interval.seconds, 1e-9)  # a first step that is also the last has no time of its own
    return {"tokens_per_second": interval.tokens / seconds, "data_wait_share": interval.waited / seconds}
