"""The library's front door: load a model, compute logits, generate."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import AxisType, Mesh

from refusion_jax.config import DTYPES, KV_DTYPES, ConfigError, DecodeConfig, ModelConfig
from refusion_jax.data import DataError, Tokenizer, find_tokenizer
from refusion_jax.decoding import Answer, Generation, Job, Rules, Statistics, Stream
from refusion_jax.decoding.batching import (
    Bounds,
    Sizes,
    bucket,
    group_by_length,
    unstarted,
)
from refusion_jax.decoding.layout import check_tokens
from refusion_jax.decoding.memory import fitting_rows
from refusion_jax.decoding.method_rows import decode_method, query_width
from refusion_jax.decoding.rules import DEFAULT_RULES
from refusion_jax.huggingface import (
    CheckpointError,
    local_directory,
    read_model_config,
    read_objective,
    read_params,
    read_tokenizer,
)
from refusion_jax.methods import Method, choose_method, settings_of, without_slots
from refusion_jax.modeling import Transformer, Visibility
from refusion_jax.modeling.quantization import QUANTIZATIONS
from refusion_jax.prompts import Prepared, Prompt, brief, encode, is_whole, prepare_prompt
from refusion_jax.responses import Detokenizer, finish
from refusion_jax.sharding import AXES, check_widths, row_shares, shared_rows
from refusion_jax.training.run_directory import TOKENIZER_NAME, read_run_config
from refusion_jax.training.weights import is_begun_run, param_shardings, run_params
from refusion_jax.watching import Observer, Watch


@dataclasses.dataclass(frozen=True)
class Model:
    """A model ready to use.

    Attributes:
      config: its shape and special tokens.
      module: the Flax module; a pure function of `params`.
      params: the parameter tree.
      tokenizer: None where the directory has none.
      decode: the decode settings of the run it came from, or the defaults.
      mesh: what `params` are split over and decoding runs on; None for one device.
      objective: what it was trained with, one of `config.OBJECTIVES`; "" where that is not known.
      block_lengths: of "block_diffusion" the lengths of the blocks it was trained in, as far as known.
    """

    config: ModelConfig
    module: Transformer
    params: Any
    tokenizer: Tokenizer | None
    decode: DecodeConfig
    mesh: Mesh | None = None
    objective: str = ""
    block_lengths: tuple[int, ...] = ()


def load(
    path: str | Path,
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    quantize: str | None = None,
    kv_dtype: str | None = None,
) -> Model:
    """Loads a run directory of `train.py`, a Hugging Face directory, or a model of the Hugging Face Hub.

    Args:
      path: the directory; or a Hub name "org/name" or "org/name@revision", which names no directory here.
      dtype: "float32", "bfloat16" or "float16", for parameters and activations; by default what the checkpoint says.
      mesh: a mesh of `sharding.make_mesh`, over which the parameters are split, and on which `generate` decodes: rows
        over `data` and `fsdp`, heads over `tensor`. By default all is on the first device.
      quantize: "int8" rounds the weights of matrix products to int8 while they are read, see `modeling.quantization`:
        devices never hold more than one of them in another type; of a Hugging Face directory, more than one layer's.
      kv_dtype: "int8" keeps a decode's keys and values in int8, "" in the type of activations; by default what a run's
        configuration says, else as activations.

    Raises:
      CheckpointError: when there is no such directory or model, or it is not usable.
      ConfigError: for an unknown type, a KV buffer in int8 with activations in float16, or a mesh that cannot split the
        model evenly.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype is {brief(dtype)}, not one of {', '.join(DTYPES)}.")
    if quantize is not None and quantize not in QUANTIZATIONS:
        raise ConfigError(f"quantize is {brief(quantize)}, not one of {', '.join(QUANTIZATIONS)}.")
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        raise ConfigError(f"kv_dtype is {brief(kv_dtype)}; it must be 'int8', or '' for the type of activations.")
    if mesh is not None:
        _check_mesh_kind(mesh)
    directory = local_directory(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give a run directory or a Hugging Face directory.")
    if is_begun_run(directory):
        run = read_run_config(directory)
        config = run.model if dtype is None else dataclasses.replace(run.model, dtype=dtype, param_dtype=dtype)
        config = _with_kv_dtype(config, kv_dtype)
        params = run_params(directory, run, _shardings(config, mesh), config.param_dtype, quantize)
        tokenizer, decode, objective = _run_tokenizer(directory), run.decode, run.train.objective
        blocks = run.slots.sizes if objective == "block_diffusion" else ()
    else:
        tokenizer = read_tokenizer(directory)
        config = _with_kv_dtype(read_model_config(directory, tokenizer, dtype), kv_dtype)
        params, decode = read_params(directory, config, _shardings(config, mesh), quantize), DecodeConfig()
        objective, blocks = read_objective(directory)
    return Model(config, Transformer(config), params, tokenizer, decode, mesh, objective, blocks)


def _check_mesh_kind(mesh: Any) -> None:
    _require(mesh, Mesh, "mesh", "one that sharding.make_mesh returns")
    if mesh.axis_names != AXES or set(mesh.axis_types) != {AxisType.Auto}:
        axes = ", ".join(f"{name} ({kind.name})" for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True))
        raise ConfigError(f"mesh has the axes {axes}; give one that sharding.make_mesh returns.")


def _with_kv_dtype(config: ModelConfig, kv_dtype: str | None) -> ModelConfig:
    return config if kv_dtype is None else dataclasses.replace(config, kv_dtype=kv_dtype)


def _shardings(config: ModelConfig, mesh: Mesh | None) -> Any:
    # Without a resolved vocabulary there are no shapes yet, which run_params says.
    if mesh is None or not config.vocab_size:
        return None
    check_widths(mesh, config)
    return param_shardings(config, mesh)


def _run_tokenizer(workdir: epath.Path) -> Tokenizer | None:
    try:
        return find_tokenizer(workdir / TOKENIZER_NAME)
    except DataError as error:
        raise CheckpointError(str(error)) from error


def logits(model: Model, tokens: Any, position_ids: Any, visibility: str | None = None) -> jax.Array:
    """Logits of one forward.

    Args:
      model: a loaded model.
      tokens, position_ids: (batch, length) int; position IDs may be in any order.
      visibility: "causal" in buffer order, or "bidirectional"; by default as the model's objective has it: "llada" and
        "dream" bidirectional, others causal.

    Returns:
      (batch, length, vocab_size) float32.

    Raises:
      ConfigError: when the shapes differ, a token or position lies outside what the model has, or for another
        visibility.
    """
    if visibility not in (None, "causal", "bidirectional"):
        raise ConfigError(f"visibility is {brief(visibility)}; it must be 'causal' or 'bidirectional', or left out.")
    tokens, position_ids = jnp.asarray(tokens, jnp.int32), jnp.asarray(position_ids, jnp.int32)
    if tokens.ndim != 2 or tokens.shape != position_ids.shape or not tokens.size:
        raise ConfigError(
            f"tokens have shape {tokens.shape} and position_ids {position_ids.shape}; both must be (batch, length), "
            "neither of them 0."
        )
    if bool(jnp.any((tokens < 0) | (tokens >= model.config.vocab_size))):
        raise ConfigError(f"tokens must lie in [0, {model.config.vocab_size}), the vocabulary.")
    if bool(jnp.any((position_ids < 0) | (position_ids >= model.config.context_length))):
        raise ConfigError(f"position_ids must lie in [0, {model.config.context_length}), the model's maximum.")
    by_default = "bidirectional" if model.objective in ("llada", "dream") else "causal"
    is_causal = (visibility or by_default) == "causal"
    return _logits(model.module, is_causal, model.params, tokens, position_ids)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(module: Transformer, is_causal: bool, params: Any, tokens: jax.Array, position_ids: jax.Array) -> jax.Array:
    seen = Visibility.causal(*tokens.shape)
    if not is_causal:
        seen = seen.replace(order=jnp.zeros_like(seen.order), in_buffer_order=False)
    return module.apply({"params": params}, tokens, position_ids, seen)


@dataclasses.dataclass(frozen=True)
class StreamRequest:
    """One prompt of a stream.

    Attributes:
      index: names the prompt; with `seed`, all that its random draws depend on.
      prompt: text, token IDs, a conversation or a template; or what `prepare` made of it.
      config: how to decode it.
      seed: of sampling.
    """

    index: int
    prompt: Prompt | Prepared
    config: DecodeConfig
    seed: int = 0


_UNWATCHED = Watch()


def prepare(
    model: Model,
    prompt: Prompt,
    config: DecodeConfig,
    prefix: str | Sequence[int] | None = None,
    method: Method | None = None,
) -> Prepared:
    """Checks and lays out a prompt, for a method: by default that of the model's training objective.

    Raises:
      ConfigError: when it cannot be decoded, in one sentence.
    """
    method = choose_method(model.objective, block_lengths=model.block_lengths) if method is None else method
    return _prepare(model, prompt, config, len(_encode_prefix(model, prefix)), method)


def _prepare(model: Model, prompt: Prompt, config: DecodeConfig, prefix_length: int, method: Method) -> Prepared:
    if method.name != "refusion" and isinstance(prompt, Mapping) and "segments" in prompt:
        raise ConfigError(f"The method {method.name!r} does not fill holes; give a prompt instead of segments.")
    return prepare_prompt(model.tokenizer, model.config, prompt, settings_of(config, method), prefix_length)


def _encode_prefix(model: Model, prefix: str | Sequence[int] | None) -> list[int]:
    if prefix is None:
        return []
    if not isinstance(prefix, str | Sequence | np.ndarray):
        raise ConfigError(f"prefix is {brief(prefix)}; give a text or a list of token IDs.")
    tokens = encode(model.tokenizer, prefix)
    check_tokens(tokens, "Prefix token", model.config)
    most = model.config.context_length
    if len(tokens) >= most:
        raise ConfigError(f"The prefix has {len(tokens)} tokens, which leaves no room in {most} positions; shorten it.")
    return tokens


def _require(value: Any, kind: type, name: str, what: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {brief(value)}; give {what}.")


def _check_options(rules: Rules, watch: Watch, statistics: Statistics | None, method: Method) -> None:
    _require(rules, Rules, "rules", "a Rules object")
    _require(watch, Watch, "watch", "a Watch object")
    if statistics is not None:
        _require(statistics, Statistics, "statistics", "a Statistics object")
    if method.name != "refusion":
        for name, is_given in (
            ("rules", rules != DEFAULT_RULES),
            ("watch.on_slot", watch.on_slot is not None),
            ("watch.on_prefix", watch.on_prefix is not None),
        ):
            if is_given:
                raise ConfigError(f"{name} is for slots, which the method {method.name!r} does not have; leave it out.")


def generate_stream(
    model: Model,
    requests: Iterable[StreamRequest],
    *,
    prompt_length: int,
    response_length: int,
    batch_size: int | str = 32,
    most_requests: int | None = None,
    num_samples: int = 1,
    prefix: str | Sequence[int] | None = None,
    rules: Rules = DEFAULT_RULES,
    suppressed: int = 0,
    sampling: bool = True,
    infilling: bool = True,
    statistics: Statistics | None = None,
    watch: Watch = _UNWATCHED,
    method: Method | None = None,
    allow_objective: str | None = None,
) -> Iterator[Answer]:
    """Decodes a stream of prompts of any length on a fixed batch; yields answers as they finish.

    Requests are taken one by one as rows become free, so the stream may be longer than memory.

    Args:
      model: a loaded model.
      requests: the prompts.
      prompt_length, response_length: the largest of any request, in tokens (`prepare` tells them).
      batch_size: rows decoded at once, or "auto": as many as free memory holds, at most 256 for each of the devices
        that rows are split over; a number is rounded down to a multiple of theirs.
      most_requests: how many requests there will be at most, where that is known; fewer rows may do then.
      num_samples: answers per prompt.
      prefix: text or token IDs before every prompt, computed once and shared by all rows; not for conversations.
      rules: the functions that decide, see docs/rules.md.
      suppressed: the largest number of suppressed token IDs of any request.
      sampling, infilling: whether any request has a temperature, or the algorithm "paper".
      statistics: an object to add to.
      watch: what to be told on the way.
      method, allow_objective: as of `generate`. With any but "refusion" a batch is answered when all of it is
        finished.

    Raises:
      ConfigError: for a prompt that cannot be decoded, naming it, or that exceeds what the stream was made for.
    """
    _require(model, Model, "model", "what load() returns")
    method = choose_method(model.objective, method, allow_objective, model.block_lengths)
    _check_options(rules, watch, statistics, method)
    prefix_tokens = _encode_prefix(model, prefix)
    _check_num_samples(num_samples)
    for name, length in (("prompt_length", prompt_length), ("response_length", response_length)):
        if not is_whole(length) or not 0 <= length <= model.config.context_length:
            most = model.config.context_length
            raise ConfigError(
                f"{name} is {length!r}; it must be a whole number of at most {most}, the model's maximum."
            )
    rows = _rows(model, batch_size, len(prefix_tokens) + prompt_length, response_length, method)
    rows = rows if most_requests is None else min(rows, _needed_rows(model, most_requests * num_samples))
    detokenizer = None if model.tokenizer is None else Detokenizer(model.tokenizer, model.config.eos_token_ids)
    unfinished = _Unfinished(detokenizer, num_samples)
    jobs = _jobs(model, requests, len(prefix_tokens), method, unfinished)
    if method.name != "refusion":
        # A prefix is not shared there, but prompt tokens like any other.
        own = (dataclasses.replace(job, layout=job.layout.behind(prefix_tokens)) for job in jobs)
        options: Any = {"batch_size": rows, "statistics": statistics, "mesh": model.mesh}
        yield from map(unfinished.finish, decode_method(model.module, model.params, own, method, **options))
        return
    stream = Stream(
        model.module,
        model.params,
        rows=rows,
        prompt_length=prompt_length,
        response_length=response_length,
        prefix=prefix_tokens,
        rules=rules,
        suppressed=suppressed,
        sampling=sampling,
        infilling=infilling,
        statistics=statistics,
        mesh=model.mesh,
    )
    observer = Observer(stream, watch, model.config.eos_token_ids, detokenizer)
    exhausted = False
    while stream.busy or not exhausted:
        answers: list[Answer] = []
        while stream.room and not exhausted and not answers:
            job = next(jobs, None)
            if job is None:
                exhausted = True
                break
            if job.layout.response_length:
                stream.submit(job)
            else:
                answers.append(unstarted(job))  # fixed text alone
        if stream.busy:
            answers += stream.advance(observer.most_iterations(), observer)
        for answer in answers:
            yield unfinished.finish(answer)
            observer.forget(answer)


class _Unfinished:
    """The prompts of a stream that wait for answers, `num_samples` each."""

    def __init__(self, detokenizer: Detokenizer | None, num_samples: int):
        self.num_samples, self._detokenizer = num_samples, detokenizer
        self._prepared: dict[int, Prepared] = {}
        self._missing: dict[int, int] = {}

    def add(self, index: int, prepared: Prepared) -> None:
        """Notes a prompt.

        Raises:
          ConfigError: when there is one of that index.
        """
        if index in self._prepared:
            raise ConfigError(f"Prompt {index} is in the stream already; give each an index of its own.")
        self._prepared[index], self._missing[index] = prepared, self.num_samples

    def finish(self, answer: Answer) -> Answer:
        """The answer with its texts; a prompt that has all of its answers is forgotten."""
        finished = finish(self._detokenizer, self._prepared[answer.index], answer)
        self._missing[answer.index] -= 1
        if not self._missing[answer.index]:
            del self._prepared[answer.index], self._missing[answer.index]
        return finished


def _jobs(
    model: Model, requests: Iterable[StreamRequest], prefix_length: int, method: Method, unfinished: _Unfinished
) -> Iterator[Job]:
    for request in requests:
        _require(request, StreamRequest, "A request", "a StreamRequest")
        _require(request.config, DecodeConfig, f"The config of prompt {request.index}", "a DecodeConfig")
        each = request.prompt
        if not isinstance(each, Prepared):
            each = _prepare_numbered(model, request.index, each, request.config, prefix_length, method)
        elif each.config != settings_of(each.config, method):
            raise ConfigError(
                f"Prompt {request.index} was prepared for another method than {method.name!r}; name it to prepare(), "
                "too."
            )
        unfinished.add(request.index, each)
        for sample in range(unfinished.num_samples):
            yield Job(request.index, sample, each.layout, each.config, request.seed)


def _prepare_numbered(
    model: Model, index: int, prompt: Prompt, config: DecodeConfig, prefix_length: int, method: Method
) -> Prepared:
    try:
        return _prepare(model, prompt, config, prefix_length, method)
    except ConfigError as error:
        raise ConfigError(f"Prompt {index}: {error}") from error


def _check_num_samples(num_samples: int) -> None:
    if not is_whole(num_samples) or num_samples < 1:
        raise ConfigError(f"num_samples is {num_samples!r}; ask for at least one.")


def _rows(model: Model, batch_size: int | str, prompt_length: int, response_length: int, method: Method) -> int:
    if batch_size == "auto":
        sizes = Sizes.of(1, prompt_length, response_length, 0)
        widest = query_width(method, sizes.prompt_length, sizes.capacity)
        return fitting_rows(model.config, sizes.buffer_length, widest, mesh=model.mesh)
    if not is_whole(batch_size) or int(batch_size) < 1:
        raise ConfigError(f"batch_size is {batch_size!r}; decode at least one row at once, or say 'auto'.")
    return int(batch_size) if model.mesh is None else shared_rows(model.mesh, int(batch_size))


def _needed_rows(model: Model, responses: int) -> int:
    return bucket(responses, row_shares(model.mesh))


def generate(
    model: Model,
    prompts: Iterable[Prompt],
    config: DecodeConfig | Sequence[DecodeConfig] | None = None,
    *,
    seed: int | Sequence[int] = 0,
    batch_size: int | str = 32,
    num_samples: int = 1,
    prefix: str | Sequence[int] | None = None,
    rules: Rules = DEFAULT_RULES,
    statistics: Statistics | None = None,
    watch: Watch = _UNWATCHED,
    on_progress: Callable[[int], None] | None = None,
    method: Method | None = None,
    allow_objective: str | None = None,
) -> Generation:
    """Decodes responses to a list of prompts.

    Args:
      model: a loaded model.
      prompts: texts when the model has a tokenizer, token-ID lists of any lengths, conversations, which the tokenizer's
        chat template turns into text, `{"messages": [{"role": "user", "content": "..."}], "enable_thinking": False}`
        (true where it is left out), or templates with holes:
        `{"segments": ["def add(a, b):", {"hole": 32}, "return result"]}`.
      config: settings for all prompts or one per prompt; by default the model's own. One batch may mix any settings.
      seed: one for all prompts or one per prompt; with a prompt's index, all that sampling depends on.
      batch_size: the most rows decoded at once, or "auto": as many as free memory holds. On a mesh it is
        rounded down to a multiple of the devices that rows are split over.
      num_samples: responses per prompt; they stand next to each other in the result.
      prefix: text or token IDs before every prompt, computed once and shared by all rows; not for conversations.
      rules: the functions that decide, see docs/rules.md.
      statistics: an object to add to.
      watch: what to be told on the way.
      on_progress: called with the number of finished responses, whenever some have finished.
      method: how to decode; by default as the model's objective wants it. Any but "refusion" takes neither holes, nor
        `rules`, nor callbacks of `watch`, and has no use for the slot settings of `config`.
      allow_objective: the model's training objective, or "unknown": decodes it with a `method` for another.

    Raises:
      ConfigError: for a prompt or setting that cannot be used, naming the prompt.
    """
    _require(model, Model, "model", "what load() returns")
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts is {brief(prompts)}, no list of prompts; give a list, also of one.")
    prompts = list(prompts)
    if any(is_whole(prompt) for prompt in prompts):
        raise ConfigError("prompts is a single list of token IDs; give a list of prompts.")
    method = choose_method(model.objective, method, allow_objective, model.block_lengths)
    config = own_settings(model, method) if config is None else config
    configs = [config] * len(prompts) if isinstance(config, DecodeConfig) else list(config)
    if not all(isinstance(each, DecodeConfig) for each in configs):
        raise ConfigError("config holds something other than a DecodeConfig; give one, or one per prompt.")
    if len(configs) != len(prompts):
        raise ConfigError(f"{len(configs)} configs for {len(prompts)} prompts; give one, or one per prompt.")
    seeds: list[Any] = (
        list(seed) if isinstance(seed, Sequence | np.ndarray) and np.ndim(seed) else [seed] * len(prompts)
    )
    if len(seeds) != len(prompts):
        raise ConfigError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one, or one per prompt.")
    for value in seeds or [0 if isinstance(seed, Sequence) else seed]:
        if not is_whole(value) or not 0 <= value < 2**31:
            raise ConfigError(f"seed is {value!r}; it must be a whole number in [0, 2**31).")
    if on_progress is not None and not callable(on_progress):
        raise ConfigError(f"on_progress is {brief(on_progress)}; give a function.")
    _check_options(rules, watch, statistics, method)
    _rows(model, batch_size, 1, 1, method)  # refuses a wrong one before any work
    _check_num_samples(num_samples)
    prefix_length = len(_encode_prefix(model, prefix))
    prepared = [
        _prepare_numbered(model, index, prompt, each, prefix_length, method)
        for index, (prompt, each) in enumerate(zip(prompts, configs, strict=True))
    ]
    if not prompts:
        return Generation.of([])
    rows = _rows(
        model,
        batch_size,
        prefix_length + max(each.prompt_length for each in prepared),
        max(each.response_length for each in prepared),
        method,
    )
    rows = min(rows, _needed_rows(model, len(prompts) * num_samples))
    answers: list[Answer] = []
    for group in group_by_length([each.response_length for each in prepared], rows):
        members = [prepared[index] for index in group]
        for answer in generate_stream(
            model,
            (StreamRequest(index, prepared[index], configs[index], int(seeds[index])) for index in group),
            batch_size=rows,
            num_samples=num_samples,
            prefix=prefix,
            rules=rules,
            statistics=statistics,
            watch=watch,
            method=method,
            allow_objective=allow_objective,
            **dataclasses.asdict(Bounds.of((each.layout, each.config) for each in members)),
        ):
            answers.append(answer)
            if on_progress is not None:
                on_progress(len(answers))
    return Generation.of(answers)


def own_settings(model: Model, method: Method) -> DecodeConfig:
    """The settings of the model's run, of which those about slots mean something to ReFusion alone."""
    return model.decode if method.name == "refusion" else without_slots(model.decode)


def encode_prompt(model: Model, prompt: str | Sequence[int]) -> list[int]:
    """Token IDs of a prompt.

    Raises:
      ConfigError: for a text when the model has no tokenizer or it does not know all characters; for a list that does
        not hold token IDs.
    """
    return encode(model.tokenizer, prompt)
