"""A training run from configuration to checkpoint, on one process or on all those of a pod."""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from refusion_jax.config import Config, ConfigError, ModelConfig, loss_terms, to_dict
from refusion_jax.data import Dataset, Tokenizer, find_tokenizer, iterate, load_dataset, make_batches
from refusion_jax.files import write_json
from refusion_jax.huggingface import local_directory, read_tokenizer
from refusion_jax.methods import choose_method
from refusion_jax.modeling import Transformer
from refusion_jax.sharding import check_mesh, local_rows, make_mesh, put_batch
from refusion_jax.slots import batch_from_arrays
from refusion_jax.training.checkpoint import About, Checkpoints
from refusion_jax.training.evaluation import held_out_answers, held_out_loss
from refusion_jax.training.flops import peak_flops, training_flops_per_token
from refusion_jax.training.guard import StopRequest, Watchdog
from refusion_jax.training.metrics import MetricsWriter, finite
from refusion_jax.training.optimizer import learning_rate_schedule, make_optimizer
from refusion_jax.training.run_directory import (
    TOKENIZER_NAME,
    check_workdir,
    claim_workdir,
    lock_workdir,
    save_tokenizer,
)
from refusion_jax.training.state import TrainState, init_state
from refusion_jax.training.step import Metrics, make_eval_loss, make_run_step
from refusion_jax.training.weights import initial_params, is_begun_run, weights_digest

SUMMARY_NAME = "summary.json"
PROFILE_NAME = "profile"


class DivergedError(ValueError):
    """Too many steps in a row whose loss or gradient was not finite."""


def resolve(config: Config, tokenizer: Tokenizer) -> Config:
    """Fills in what the tokenizer decides: special tokens, and the vocabulary's size where it is 0.

    Raises:
      ConfigError: when the configured vocabulary is too small for the tokenizer, or has other special tokens.
    """
    if 0 < config.model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size}, too small for the tokenizer's {tokenizer.vocab_size} "
            "tokens; use 0 to take the tokenizer's."
        )
    special: dict[str, Any] = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_ids": tokenizer.eos_token_ids,
        "mask_token_id": tokenizer.mask_token_id,
    }
    for name, token in special.items():
        given = getattr(config.model, name)
        if given not in (token, getattr(ModelConfig(), name)):
            raise ConfigError(f"model.{name} is {given}, but the tokenizer's is {token}, which decides; leave it out.")
    if tokenizer.mask_token_id >= tokenizer.vocab_size:
        raise ConfigError(
            f"The mask token of the weights, {tokenizer.mask_token_id}, is beyond the tokenizer's "
            f"{tokenizer.vocab_size} tokens; add it to the tokenizer.json, as a special token."
        )
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size, **special))


def _count_steps(config: Config, dataset: Dataset) -> Config:
    """Turns the passes that `train.epochs` asks for into steps."""
    if not config.train.epochs:
        return config
    batches = make_batches(config.data, dataset.train, seed=config.train.seed, batch_size=config.train.batch_size)
    steps = sum(batches.batches_in_epoch(epoch) for epoch in range(config.train.epochs))
    _say(f"Passes over the data: {config.train.epochs}, in {steps:,} steps.")
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps, epochs=0))


def train(config: Config, workdir: os.PathLike[str] | str) -> None:
    """Trains a model on all devices of all processes, or continues the run that `workdir` holds.

    SIGTERM and Ctrl-C end it early, but not without a checkpoint; SIGTERM of any process ends all at the same step.

    Args:
      config: what to train, the same on every process.
      workdir: the run directory, on disk or gs://bucket/name; the same for every process.

    Raises:
      ConfigError, DataError, WorkdirError, CheckpointError: for input that cannot be used, before the first step; the
        latter two also when the disk is full later.
      DivergedError: when too many steps in a row had a loss or gradient that was not finite.
      KeyboardInterrupt: after Ctrl-C.
    """
    began, workdir = time.perf_counter(), epath.Path(workdir)
    mesh = make_mesh(config.mesh)
    check_mesh(mesh, config.model, config.train.batch_size, config.train.accumulate_steps)
    dataset = load_dataset(config.data, seed=config.train.seed, tokenizer=_given_tokenizer(config, workdir))
    config = _count_steps(resolve(config, dataset.tokenizer), dataset)
    check_workdir(workdir, config)

    module = Transformer(config.model)
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    state, shardings = init_state(module, optimizer, config.train.seed, mesh, config.lora)
    state = _begin(config, state, shardings)
    base = "" if state.base is None else weights_digest(state.base)
    about = About(to_dict(config), dataset.fingerprint, dict(dataset.tokenizer.files), base)
    with (
        _claim(workdir, config, dataset.tokenizer),
        _closing(Checkpoints(workdir, config.checkpoint, about)) as checkpoints,
    ):
        state = checkpoints.restore(state)
        if int(state.step) >= config.train.steps:
            _say(f"{workdir} has already been trained for {config.train.steps:,} steps.")
            return
        _announce(config, dataset, mesh, state)
        run = _Run(config, workdir, dataset, module, mesh, checkpoints, began)
        run.train_step = make_run_step(config, module, optimizer, mesh, shardings)
        run.eval_loss = make_eval_loss(
            module,
            config.slots,
            mesh,
            shardings,
            loss_chunk=config.train.loss_chunk,
            objective=config.train.objective,
        )
        with jax.set_mesh(mesh):
            run.train(state)


@contextlib.contextmanager
def _closing(checkpoints: Checkpoints) -> Iterator[Checkpoints]:
    """Closes checkpoints at the end; of several processes one that fails does not wait for what the others wrote."""
    try:
        yield checkpoints
    except BaseException:
        if jax.process_count() == 1:
            checkpoints.close()
        raise
    checkpoints.close()


def _begin(config: Config, state: TrainState, shardings: Any) -> TrainState:
    """The state with the weights that the run begins with, where it is told to."""
    if not config.train.init_from:
        return state
    part = "base" if config.lora.rank else "params"
    return state.replace(**{part: initial_params(config.train.init_from, config.model, getattr(shardings, part))})


def _given_tokenizer(config: Config, workdir: epath.Path) -> Tokenizer | None:
    """The tokenizer of a run that continues, or that a new one begins with."""
    found = find_tokenizer(workdir / TOKENIZER_NAME)
    if found is not None or not config.train.init_from:
        return found
    begin = local_directory(config.train.init_from)
    return find_tokenizer(begin / TOKENIZER_NAME) if is_begun_run(begin) else read_tokenizer(begin)


def _claim(workdir: epath.Path, config: Config, tokenizer: Tokenizer) -> contextlib.AbstractContextManager[Any]:
    """Makes the run directory, one process for all; while the result is open no other run can have it."""
    lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if jax.process_index() == 0:
        claim_workdir(workdir, config)
        lock = lock_workdir(workdir)
        save_tokenizer(workdir, tokenizer)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("refusion_jax.workdir")
    return lock


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def _announce(config: Config, dataset: Dataset, mesh: Mesh, state: TrainState) -> None:
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
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    where = f"{mesh.size} device(s)" + (f", {axes}" if mesh.size > 1 else "")
    where += f", of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    _say(f"Model: {parameters:,} parameters, vocabulary {config.model.vocab_size}, on {where}.")
    _say(
        f"Data: {len(dataset.train):,} training and {len(dataset.held_out):,} held-out examples, "
        f"{dataset.train.lengths.mean():.0f} tokens on average; dropped: {reasons or 'none'}."
    )
    if int(state.step):
        _say(f"Continuing from step {int(state.step):,}.")


@dataclasses.dataclass
class _Interval:
    """What happened since the last record: training seconds, of these spent waiting for data, and useful tokens."""

    seconds: float = 0.0
    waited: float = 0.0
    tokens: int = 0

    def __add__(self, other: "_Interval") -> "_Interval":
        return _Interval(self.seconds + other.seconds, self.waited + other.waited, self.tokens + other.tokens)


class _Run:
    """The loop over steps and its bookkeeping."""

    train_step: Any
    eval_loss: Any

    def __init__(
        self,
        config: Config,
        workdir: epath.Path,
        dataset: Dataset,
        module: Transformer,
        mesh: Mesh,
        checkpoints: Checkpoints,
        began: float,
    ):
        self.config, self.workdir, self.dataset, self.module = config, workdir, dataset, module
        self.mesh, self.checkpoints, self.began = mesh, checkpoints, began
        self.learning_rate = learning_rate_schedule(config.optimizer, config.train.steps)
        self.compile_seconds, self.total, self.interval = 0.0, _Interval(), _Interval()
        self._tracing = False

    def train(self, state: TrainState) -> None:
        """Trains from the state's step to the last, writing records and checkpoints, then the summary."""
        config, data, start = self.config.train, self.config.data, int(state.step)
        rows = local_rows(self.mesh, config.batch_size)
        batches = make_batches(data, self.dataset.train, seed=config.seed, batch_size=config.batch_size, rows=rows)
        with contextlib.ExitStack() as stack:
            reader = iterate(
                batches, start, read_threads=data.read_threads, prefetch=data.prefetch, workers=data.workers
            )
            stack.enter_context(contextlib.closing(reader))
            self.writer = MetricsWriter(self.workdir, start, config.steps, active=jax.process_index() == 0)
            stack.enter_context(contextlib.closing(self.writer))
            self.watchdog = Watchdog(config.slow_step_factor, self.writer.say)
            stack.enter_context(contextlib.closing(self.watchdog))
            self.stop = stack.enter_context(StopRequest())
            stack.enter_context(self._profiling())
            self._loop(state, reader)

    def _loop(self, state: TrainState, reader: Iterator[dict[str, np.ndarray]]) -> None:
        config, start = self.config.train, int(state.step)
        seed = jnp.int32(config.seed)
        self.seconds_before = self.writer.last.get("seconds", 0.0)
        self.since, before = time.perf_counter(), None
        for step in range(start + 1, config.steps + 1):
            self._profile(step)
            asked = time.perf_counter()
            arrays = next(reader)
            self.interval.waited += time.perf_counter() - asked
            self.watchdog.begin(step)
            batch = put_batch(batch_from_arrays(arrays), self.mesh, config.batch_size)
            state, metrics = self.train_step(state, batch, seed)
            # Waiting for the step before keeps the device busy with this one meanwhile.
            if before is not None:
                self._finish(step - 1, before)
            before = metrics
            stopping = self.stop.after(step)
            evaluating = step == config.steps or (config.eval_every > 0 and step % config.eval_every == 0)
            first, last = step == start + 1, step == config.steps or stopping is not None
            saving = last or step % self.config.checkpoint.save_every == 0
            if first or last or saving or evaluating or step % config.log_every == 0:
                self._finish(step, metrics)
                before = None
                self.watchdog.pause()
                evaluation = self._log(step, state, metrics, first, evaluating)
                if saving:
                    self.checkpoints.save(state, evaluation)
            self.checkpoints.check()
            if stopping is not None:
                self._stop(step, stopping)
                return
        self.checkpoints.close()
        self._summarise()

    def _finish(self, step: int, metrics: Metrics) -> None:
        """Waits for a step and looks at what came of it.

        Raises:
          DivergedError: when too many in a row came to nothing.
        """
        tokens, finite, in_a_row = jax.device_get((metrics.num_tokens, metrics.finite, metrics.skipped_in_a_row))
        self.interval.tokens += int(tokens)
        self.writer.advance()
        if finite:
            return
        most = self.config.train.max_skipped
        what = f"Step {step:,}: the loss or its gradient is not finite"
        self.writer.say(f"{what}; nothing was updated ({int(in_a_row)} such in a row, {most} end the run).")
        if in_a_row >= most:
            raise DivergedError(
                f"{what}, as in the {most} steps up to it; lower optimizer.learning_rate or look at the data of these "
                f"steps. The checkpoints in {self.workdir} are as they were."
            )

    def _log(
        self, step: int, state: TrainState, metrics: Metrics, first: bool, evaluating: bool
    ) -> dict[str, float] | None:
        """Evaluates and writes the step's record where they are due; returns the evaluation."""
        if first:  # it compiles, which belongs in no rate
            self.compile_seconds, self.interval = time.perf_counter() - self.since, _Interval()
            self.since = time.perf_counter()
        evaluation = None
        if evaluating or step % self.config.train.log_every == 0:
            self.interval.seconds = time.perf_counter() - self.since
            record = self._record(step, metrics)
            if evaluating:
                evaluation = self.evaluate(state)
                record |= evaluation
            record["seconds"] = self.seconds_before + time.perf_counter() - self.began
            self.writer.write(record)
            self.total += self.interval
            self.interval, self.since = _Interval(), time.perf_counter()
        return evaluation

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Held-out loss and exact match with the parameters of `state`; nothing without held-out examples."""
        if not len(self.dataset.held_out):
            return {}
        params = state.model_params(self.config.lora)
        losses = held_out_loss(self.eval_loss, params, self.dataset, self.config, self.mesh)
        count = self.config.train.eval_decode_examples
        method = choose_method(self.config.train.objective, block_lengths=self.config.slots.sizes)
        return losses | held_out_answers(self.module, params, self.dataset, self.config.decode, count, method=method)

    def _record(self, step: int, metrics: Metrics) -> dict[str, float]:
        values = jax.device_get(metrics)
        record = {
            "step": step,
            "loss": float(values.loss.total),
            **{name: float(getattr(values.loss, name[:-5])) for name in loss_terms(self.config.train.objective)},
            # Skipped steps are no updates, which the schedule counts.
            "learning_rate": float(self.learning_rate(step - 1 - int(values.skipped))),
            "grad_norm": float(values.grad_norm),
            "param_norm": float(values.param_norm),
            "skipped_steps": int(values.skipped),
            **self._rates(self.interval),
        }
        memory = jax.local_devices()[0].memory_stats() or {}
        return record | ({"peak_memory_bytes": memory["peak_bytes_in_use"]} if "peak_bytes_in_use" in memory else {})

    def _rates(self, interval: _Interval) -> dict[str, float]:
        seconds = max(interval.seconds, 1e-9)  # a first step that is also the last has no time of its own
        per_chip = interval.tokens / seconds / self.mesh.size
        rates = {
            "tokens_per_second": interval.tokens / seconds,
            "tokens_per_second_per_chip": per_chip,
            "data_wait_share": interval.waited / seconds,
        }
        peak = peak_flops(self.mesh.devices.flat[0].device_kind)
        if peak is not None:
            rates["flops_utilisation"] = per_chip * training_flops_per_token(self.config) / peak
        return rates

    def _profile(self, step: int) -> None:
        """Begins or ends the trace that `train.profile_steps` asks for."""
        first, last = self.config.train.profile_steps or (0, -1)
        if first <= step <= last and not self._tracing:
            jax.profiler.start_trace(str(self.workdir / PROFILE_NAME))
            self._tracing = True
        elif step == last + 1 and self._tracing:
            self._end_trace()

    def _end_trace(self) -> None:
        jax.profiler.stop_trace()
        self._tracing = False
        first, last = self.config.train.profile_steps
        self.writer.say(f"Profile of steps {first:,} to {last:,}: {self.workdir / PROFILE_NAME}.")

    @contextlib.contextmanager
    def _profiling(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._tracing:
                self._end_trace()

    def _stop(self, step: int, number: int) -> None:
        """Ends an interrupted run, whose state is being saved.

        Raises:
          KeyboardInterrupt: after Ctrl-C.
        """
        self.checkpoints.close()
        self.writer.say(
            f"Stopped by {signal.Signals(number).name} after step {step:,} of {self.config.train.steps:,}; saved. The "
            "same command continues."
        )
        if number == signal.SIGINT:
            raise KeyboardInterrupt

    def _summarise(self) -> None:
        last = self.writer.last
        seconds = self.seconds_before + time.perf_counter() - self.began
        summary = last | self._rates(self.total) | {"compile_seconds": self.compile_seconds, "train_seconds": seconds}
        del summary["seconds"]
        if jax.process_index() == 0:
            write_json(self.workdir / SUMMARY_NAME, finite(summary))
        rates = f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['data_wait_share']:.1%} of it waiting for data"
        _say(f"Trained {last['step']:,} steps in {seconds:.0f} s: {rates}, loss {last['loss']:.3f}.")
