"""Everything that can be set, as frozen dataclasses that validate themselves.

The dataclasses are the truth. `to_dict` and `from_dict` turn a whole `Config` into plain JSON and back; the
command line edits that plain form and builds the dataclasses once, so every value passes `__post_init__`.
"""

import dataclasses
import difflib
import json
import math
import numbers
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

ALGORITHMS = ("self_correcting", "paper")
OBJECTIVES = ("hybrid", "autoregressive", "llada", "dream", "block_diffusion")
CLEAN_ORDERS = ("shuffled", "left_to_right")
MAX_TEMPERATURE = 1_000
DTYPES = ("float32", "bfloat16", "float16")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
REMAT_POLICIES = ("none", "minimal", "full")
KV_DTYPES = ("", "int8")
ATTENTIONS = ("auto", "xla", "splash", "cudnn", "pallas")
REMAT_NAMES = (*PROJECTIONS, "attention")
ROPE_TYPES = ("linear", "yarn", "llama3")
OPTIMIZERS = ("adamw", "adafactor", "lion", "muon")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
MASKING_SCHEDULES = ("linear", "cosine", "quadratic", "square_root")
SOURCES = ("synthetic", "json", "arrayrecord", "tfds")
SYNTHETIC_TASKS = "RSQA46"
FORMATS = ("auto", "pairs", "messages", "text")
TEMPLATES = ("auto", "prompt", "whole")
TURNS = ("last", "all")
TOKENIZER_TYPES = ("char", "bpe", "unigram")
LESS_IS_BETTER = ("eval_loss", "eval_ar_loss", "eval_mdm_loss", "eval_mdm_bound", "eval_nats_per_token")
MORE_IS_BETTER = ("exact_match", "tokens_per_forward")


class ConfigError(ValueError):
    """A setting that cannot be used; the message gives the value, the limit and the remedy."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for the known name closest to `name`, or the list of known names."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(sorted(known))}."


def join_some(items: list[str], most: int) -> str:
    """Joins the first `most` items for a message and says how many more there are."""
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")


def require(condition: bool, message: str) -> None:
    """Raises a ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises a ConfigError unless the value of a field is one of the choices."""
    close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    require(value in choices, f"{field} is {value!r}, not one of {', '.join(choices)}.{hint}")


_KINDS: dict[Any, tuple[type, ...]] = {
    int: (numbers.Integral,),
    float: (numbers.Real,),
    bool: (bool, np.bool_),
    str: (str,),
}


def require_types(section: str, config: Any) -> None:
    """Every plain field has its declared type; a whole number is no truth value, NumPy's scalars are welcome."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value, is_flag = getattr(config, name), isinstance(getattr(config, name), bool)
        if kind in _KINDS:
            ok = isinstance(value, _KINDS[kind]) and is_flag <= (kind is bool)
            require(ok, f"{section}.{name} is {value!r}; it must be of type {kind.__name__}.")
        elif typing.get_origin(kind) is tuple:
            item = typing.get_args(kind)[0]
            ok = isinstance(value, tuple) and all(isinstance(each, _KINDS[item]) for each in value)
            require(ok, f"{section}.{name} is {value!r}; it must be a tuple of {item.__name__}.")


def require_minimum(section: str, config: Any, **minimums: float) -> None:
    """Raises a ConfigError unless the named fields are finite and not below these minimums."""
    for field, minimum in minimums.items():
        value = getattr(config, field)
        ok = math.isfinite(value) and value >= minimum
        require(ok, f"{section}.{field} is {value!r}; it must be a number of at least {minimum}.")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and special tokens of a decoder. Field names follow Hugging Face's `config.json`.

    The defaults are Qwen3's kind. `qk_norm` normalises every query and key head; without it, and with `biases` for the
    listed `PROJECTIONS`, the same transformer is a Llama, a Qwen2 or a LLaDA.

    `vocab_size` 0 means "the tokenizer's", filled in by the trainer. `dtype` is the type of activations and matrix
    products, `param_dtype` that of stored parameters; softmax, norms, RoPE and losses are float32 regardless.

    `remat` says which activations of a layer are kept for the backward pass: all ("none"), the outputs of its matrix
    products ("minimal"), only its input ("full"), or a comma-separated list of `REMAT_NAMES`: the outputs of these
    projections, and of "attention" before `o_proj`. What is not kept is computed again.

    `rope_scaling` stretches RoPE so that a model of `rope_original_length` positions (0: `max_position_embeddings`)
    reaches `context_length`, so many times more. `rope_type` says how: "linear" divides all position IDs by it; "yarn"
    and "llama3" divide those of slow pairs and leave fast ones, with a ramp between the rates `rope_ramp` in turns per
    original length (high, low; empty: (32, 1) and (4, 1)). YaRN also multiplies cosines and sines by
    `rope_attention_factor` (0: `0.1 ln(rope_scaling) + 1`).

    In rows longer than `attention_chunk` the attention scores of so many query tokens exist at a time, and are computed
    again for the gradient; 0 never does that.

    `attention` is the program that computes attention where it can, XLA elsewhere: "splash" (TPU) and "cudnn" (GPU, in
    bfloat16 or float16) causal rows, as in training; "pallas" (TPU) tokens that see a KV buffer, as in decoding.
    "auto" takes what the platform has.

    `kv_dtype` is the type of a decode's KV buffer: "int8", with a scale for each token and head, or "", that of
    activations.
    """

    vocab_size: int = 0
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 512
    rope_theta: float = 10_000.0
    rope_type: str = "linear"
    rope_scaling: float = 1.0
    rope_original_length: int = 0
    rope_ramp: tuple[float, ...] = ()
    rope_attention_factor: float = 0.0
    rms_norm_eps: float = 1e-6
    qk_norm: bool = True
    biases: tuple[str, ...] = ()
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    pad_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1,)
    mask_token_id: int = 2
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str = "none"
    scan_unroll: int = 1
    attention_chunk: int = 1024
    attention: str = "auto"
    kv_dtype: str = ""

    def __post_init__(self) -> None:
        require_types("model", self)
        require_minimum(
            "model", self, vocab_size=0, hidden_size=1, intermediate_size=1, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=2, max_position_embeddings=1, initializer_range=0, scan_unroll=1,
            attention_chunk=0, rope_scaling=1, rope_original_length=0, rope_attention_factor=0,
        )  # fmt: skip
        for field in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, field)
            require(0 < value < math.inf, f"model.{field} is {value}; it must be positive and finite.")
        require(self.head_dim % 2 == 0, f"model.head_dim is {self.head_dim}; RoPE rotates pairs, make it even.")
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"model.num_attention_heads is {self.num_attention_heads}, not a multiple of model.num_key_value_heads "
            f"({self.num_key_value_heads}); every key head serves the same number of query heads.",
        )
        for name in self.biases:
            require_choice("model.biases", name, PROJECTIONS)
        self._check_rope()
        require_choice("model.attention", self.attention, ATTENTIONS)
        require_choice("model.dtype", self.dtype, DTYPES)
        require_choice("model.param_dtype", self.param_dtype, DTYPES)
        require(
            self.kv_dtype in KV_DTYPES,
            f"model.kv_dtype is {self.kv_dtype!r}; it must be 'int8', or '' for the type of activations.",
        )
        require(
            not self.kv_dtype or self.dtype != "float16",
            f"model.kv_dtype is {self.kv_dtype!r} with model.dtype 'float16', whose range is too narrow for attention "
            "weights times scales; use bfloat16 or float32.",
        )
        if self.remat not in REMAT_POLICIES:
            for name in self.remat_names:
                require_choice("model.remat", name, (*REMAT_POLICIES, *REMAT_NAMES))
                require(
                    name in REMAT_NAMES,
                    f"model.remat is {self.remat!r}; {name!r} stands alone, only activations can be listed: "
                    f"{', '.join(REMAT_NAMES)}.",
                )
        require(len(self.eos_token_ids) > 0, "model.eos_token_ids is empty; a response needs a token that ends it.")
        for name, token in self.special_tokens:
            ok = token >= 0 and (self.vocab_size == 0 or token < self.vocab_size)
            require(ok, f"model.{name} is {token}, outside the vocabulary of {self.vocab_size} tokens.")
        require(
            self.mask_token_id not in self.eos_token_ids,
            f"model.mask_token_id is {self.mask_token_id}, which is also an EOS; the mask needs a token of its own.",
        )

    def _check_rope(self) -> None:
        require_choice("model.rope_type", self.rope_type, ROPE_TYPES)
        if self.rope_ramp:
            ok = len(self.rope_ramp) == 2 and math.inf > self.rope_ramp[0] > self.rope_ramp[1] > 0
            require(
                ok and self.rope_type != "linear",
                f"model.rope_ramp is {self.rope_ramp} with model.rope_type {self.rope_type!r}; give a high and a low "
                "rate with yarn or llama3, nothing with linear.",
            )
        require(
            self.rope_type == "yarn" or not self.rope_attention_factor,
            f"model.rope_attention_factor is {self.rope_attention_factor} with model.rope_type {self.rope_type!r}; "
            "only yarn has one, leave it at 0.",
        )

    @property
    def remat_names(self) -> tuple[str, ...]:
        """The activations `remat` lists."""
        return tuple(name.strip() for name in self.remat.split(","))

    @property
    def context_length(self) -> int:
        """Positions the model can be used with: `max_position_embeddings`, or more where RoPE is stretched further."""
        original = self.rope_original_length or self.max_position_embeddings
        return max(self.max_position_embeddings, int(original * self.rope_scaling))

    @property
    def special_tokens(self) -> list[tuple[str, int]]:
        """(field, token ID) of every special token."""
        eos = [("eos_token_ids", token) for token in self.eos_token_ids]
        return [("pad_token_id", self.pad_token_id), ("mask_token_id", self.mask_token_id), *eos]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where examples come from and how they become rows of tokens.

    `source` "synthetic" generates `synthetic_examples` little text tasks, those of `synthetic_tasks` in turn: R repeat,
    S sum, Q count, A again, 4 and 6 Sudokus of that size. The others read the entries of `train_files`:
    "json" files (JSON lists or JSON lines), "arrayrecord" files whose records are JSON objects, or "tfds" datasets
    written `NAME[SPLIT]`, such as `gsm8k/main:1.0.0[train]`, where NAME may be the directory of a prepared dataset.
    Paths may be on `gs://`.

    `format` says what an object holds: "pairs" a prompt and a response (`prompt_field`, `response_field`), "messages" a
    conversation (`messages_field`), whose last assistant turn is the response, or with `turns` "all" each of them in an
    example of its own; "text" a document (`text_field`) without a prompt, cut into pieces of `max_length` tokens. Other
    examples longer than `max_length`, which is also the length of a packed row, are dropped and counted. "auto" looks
    at each object: a conversation, or a pair of these fields, of "query" and "response" or of "prompt" and
    "completion", which may be lists of messages.

    Responses are filled up with EOS to a multiple of `pad_responses` tokens; 0 gives each one EOS.

    `template` says how the tokenizer's chat template, or else ChatML, writes them. "prompt" lets it write the
    conversation up to the response, whose tokens and EOS follow; "whole" lets it write the response too, and finds
    where it begins in the tokens; in both, a pair is a user's and an assistant's turn. "auto" takes pairs as they are,
    and conversations whole where there is a chat template, as "prompt" in ChatML. The template is told
    `enable_thinking`.

    Each entry of `train_files` is a source. Without `weights`, an epoch has every example once; with them, about as
    many examples, drawn from the sources in these proportions. Held-out examples come from `eval_files`, or else are
    the last of each source, `eval_examples` in all, in proportion to the sources' sizes.

    `tokenizer` is a sentencepiece model file, a `tokenizer.json` or a directory with either; "" trains a sentencepiece
    model on the training examples. Tokens are kept in `cache_dir`
    for the next run, unless it is "". Batches are made `prefetch` ahead by `read_threads` threads, in `workers`
    processes of their own or, with 0, in this one.
    """

    source: str = "synthetic"
    train_files: tuple[str, ...] = ()
    eval_files: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    format: str = "auto"
    prompt_field: str = "query"
    response_field: str = "response"
    messages_field: str = "messages"
    turns: str = "last"
    text_field: str = "text"
    template: str = "auto"
    enable_thinking: bool = True
    synthetic_examples: int = 100_000
    synthetic_tasks: str = "RSQA"
    eval_examples: int = 400
    max_length: int = 128
    pad_responses: int = 0
    pack: bool = True
    tokenizer: str = ""
    tokenizer_type: str = "char"
    tokenizer_vocab_size: int = 1_000
    cache_dir: str = ""
    workers: int = 0
    read_threads: int = 1
    prefetch: int = 8

    def __post_init__(self) -> None:
        require_types("data", self)
        require_choice("data.source", self.source, SOURCES)
        require_choice("data.format", self.format, FORMATS)
        require_choice("data.turns", self.turns, TURNS)
        require_choice("data.template", self.template, TEMPLATES)
        require_choice("data.tokenizer_type", self.tokenizer_type, TOKENIZER_TYPES)
        require_minimum(
            "data", self, synthetic_examples=1, eval_examples=0, max_length=2, tokenizer_vocab_size=8, workers=0,
            read_threads=1, prefetch=1, pad_responses=0,
        )  # fmt: skip
        require(
            self.pad_responses < self.max_length,
            f"data.pad_responses is {self.pad_responses}, but with a prompt every response has to fit data.max_length "
            f"({self.max_length}): lower it.",
        )
        require(
            self.pad_responses == 0 or self.format != "text",
            f"data.pad_responses is {self.pad_responses}, but data.format 'text' has documents, which are no "
            "responses: leave it at 0.",
        )
        require(
            self.prefetch >= self.read_threads,
            f"data.prefetch is {self.prefetch}, fewer batches than data.read_threads ({self.read_threads}); raise it.",
        )
        require(
            self.source == "synthetic" or len(self.train_files) > 0,
            f"data.train_files is empty; data.source {self.source!r} needs at least one entry to read.",
        )
        require(
            self.source != "synthetic" or self.format in ("auto", "pairs"),
            f"data.format is {self.format!r}, but data.source 'synthetic' makes pairs; choose another source.",
        )
        tasks = self.synthetic_tasks
        require(
            0 < len(tasks) == len(set(tasks)) and set(tasks) <= set(SYNTHETIC_TASKS),
            f"data.synthetic_tasks is {tasks!r}; give one or more of the letters {SYNTHETIC_TASKS}, each once.",
        )
        require(
            bool(self.prompt_field) and bool(self.response_field) and self.prompt_field != self.response_field,
            f"data.prompt_field is {self.prompt_field!r} and data.response_field {self.response_field!r}; "
            "they must be two different field names.",
        )
        for field in ("messages_field", "text_field"):
            require(bool(getattr(self, field)), f"data.{field} is empty; it must be a field name.")
        self._check_weights()

    def _check_weights(self) -> None:
        if not self.weights:
            return
        require(
            self.source != "synthetic" and len(self.weights) == len(self.train_files),
            f"data.weights has {len(self.weights)} entries and data.train_files {len(self.train_files)}, of "
            f"data.source {self.source!r}; give one weight per file that is read, or none.",
        )
        for file, weight in zip(self.train_files, self.weights, strict=True):
            require(
                0 < weight < math.inf,
                f"data.weights gives {file} {weight!r}; a weight must be positive and finite, leave the file out "
                "otherwise.",
            )


@dataclasses.dataclass(frozen=True)
class SlotsConfig:
    """The training view's random draws and the weights of the two loss terms (paper section 3).

    The other objectives use them too: with `block_diffusion` slots are its blocks, each with a masking probability of
    its own; `llada` and `dream` mask single tokens and `autoregressive` none. What is next-token loss counts
    `ar_weight`, what is denoising loss `mdm_weight`.

    A slot size is drawn from `sizes` with probabilities proportional to `size_weights`; none means equal ones. The
    masking probability is `p = (1 - epsilon) * m(t) + epsilon`, `t ~ U(0, 1)`, with `m` the `masking_schedule`:
    "linear" `t` (the paper's), "cosine" `1 - cos(pi t / 2)`, "quadratic" `t**2`, "square_root" `sqrt(t)`. A masked
    token's loss is weighted by `1 / p` whatever the schedule. Clean slots stand in the buffer "shuffled" (the paper's)
    or "left_to_right", by `clean_order`.
    """

    sizes: tuple[int, ...] = (4, 8, 16, 32)
    size_weights: tuple[float, ...] = ()
    masking_schedule: str = "linear"
    epsilon: float = 1e-3
    clean_order: str = "shuffled"
    ar_weight: float = 1.0
    mdm_weight: float = 1.0

    def __post_init__(self) -> None:
        require_types("slots", self)
        require(
            len(self.sizes) > 0 and all(isinstance(size, int) and size >= 1 for size in self.sizes),
            f"slots.sizes is {self.sizes}; give at least one slot size, each a whole number of at least 1.",
        )
        require(
            len(self.size_weights) in (0, len(self.sizes)),
            f"slots.size_weights has {len(self.size_weights)} weights for {len(self.sizes)} slots.sizes; give one for "
            "each, or none for equal ones.",
        )
        weights = self.size_weights
        require(
            not weights or (all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0),
            f"slots.size_weights is {weights}; weights must be finite, not negative, and not all 0.",
        )
        require_choice("slots.masking_schedule", self.masking_schedule, MASKING_SCHEDULES)
        require_choice("slots.clean_order", self.clean_order, CLEAN_ORDERS)
        require(0 < self.epsilon < 1, f"slots.epsilon is {self.epsilon}; it must lie strictly between 0 and 1.")
        require_minimum("slots", self, ar_weight=0, mdm_weight=0)
        require(
            self.ar_weight + self.mdm_weight > 0,
            "slots.ar_weight and slots.mdm_weight are both 0; one of the loss terms must count.",
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Objective, length and rhythm of a run. `objective` is "hybrid", ReFusion's, or another system's, see
    `refusion_jax.views`: "autoregressive", "llada", "dream" or "block_diffusion".

    A run has so many `steps`, or so many passes over the data, `epochs`, which the trainer turns into steps; the other
    of the two is 0. `batch_size` counts rows of `data.max_length` tokens over all devices: a packed row holds several
    examples. `eval_every` 0 evaluates only at the end: the losses under `eval_draws` fixed draws of every held-out
    example, and the exact match of `eval_decode_examples` decoded prompts.

    Two settings trade time for memory. `accumulate_steps` computes the gradient of a batch in so many parts one after
    another; the gradient is the same. `loss_chunk` is the number of positions, on each device, whose logits exist at a
    time; 0 means all.

    `init_from` names a run or Hugging Face directory, or a model of the Hub, whose weights and tokenizer a new run
    begins with. `profile_steps` are the first and the last step of a profiler trace; empty takes none. A step whose
    loss or gradient is not finite changes nothing; `max_skipped` of them in a row end the run. A step that takes
    `slow_step_factor` times as long as those before it is reported.
    """

    objective: str = "hybrid"
    steps: int = 1_000
    epochs: int = 0
    batch_size: int = 16
    accumulate_steps: int = 1
    loss_chunk: int = 256
    seed: int = 0
    log_every: int = 50
    eval_every: int = 500
    eval_draws: int = 1
    eval_decode_examples: int = 64
    init_from: str = ""
    profile_steps: tuple[int, ...] = ()
    max_skipped: int = 10
    slow_step_factor: float = 10.0

    def __post_init__(self) -> None:
        require_types("train", self)
        require_choice("train.objective", self.objective, OBJECTIVES)
        require_minimum(
            "train", self, steps=0, epochs=0, batch_size=1, accumulate_steps=1, loss_chunk=0, seed=0, log_every=1,
            eval_every=0, eval_draws=1, eval_decode_examples=0, max_skipped=1, slow_step_factor=1,
        )  # fmt: skip
        require(
            (self.steps > 0) != (self.epochs > 0),
            f"train.steps is {self.steps} and train.epochs {self.epochs}; one of them says how long a run is: give at "
            "least 1, and 0 for the other.",
        )
        divisors = [n for n in range(1, min(self.batch_size, 1000) + 1) if self.batch_size % n == 0]
        require(
            self.batch_size % self.accumulate_steps == 0,
            f"train.accumulate_steps is {self.accumulate_steps}, which does not divide train.batch_size "
            f"({self.batch_size}); use one of {', '.join(map(str, divisors))}.",
        )
        require(self.seed < 2**31, f"train.seed is {self.seed}; it must be below 2**31.")
        first, last, *more = (*self.profile_steps, 1, 1)[: max(2, len(self.profile_steps))]
        require(
            len(self.profile_steps) in (0, 2) and 1 <= first <= last and not more,
            f"train.profile_steps is {self.profile_steps}; give the first and the last step of the trace, as in 10,15.",
        )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Update rule, learning rate and clipping by global norm.

    `name` is "adamw", "adafactor" (no first moment, factored second one), "lion", or "muon" (the layers' kernels by
    Muon with its updates scaled to the size of Adam's, everything else by Adam). `learning_rate` means the size of a
    step for each of them; Lion wants a several times smaller one. `beta1` is the momentum (Adafactor has none), `beta2`
    the decay of second moments (Lion: of the momentum itself; Adafactor has its own), `epsilon` Adam's and Muon's.

    The learning rate rises from 0 over `warmup_steps`; then `schedule` takes it to `learning_rate * final_ratio` along
    a "cosine" or a line ("linear"), or leaves it "constant"; "wsd" (warm-up, stable, decay) is constant but for the
    last `decay_steps`, a line.

    `weight_decay` is multiplied by the learning rate and never applies to norm scales, to input and output embedding
    only with `decay_embeddings`. `moments_dtype` is the type in which moments are stored; updates are computed in
    float32. In bfloat16 a second moment follows only changes of more than 0.4 %: keep `beta2` at 0.99 or below.
    """

    name: str = "adamw"
    learning_rate: float = 3e-3
    schedule: str = "cosine"
    warmup_steps: int = 100
    decay_steps: int = 0
    final_ratio: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decay_embeddings: bool = True
    clip_norm: float = 1.0
    moments_dtype: str = "float32"

    def __post_init__(self) -> None:
        require_types("optimizer", self)
        require_choice("optimizer.name", self.name, OPTIMIZERS)
        require_choice("optimizer.schedule", self.schedule, SCHEDULES)
        require_choice("optimizer.moments_dtype", self.moments_dtype, DTYPES[:2])
        require_minimum(
            "optimizer", self, learning_rate=0, warmup_steps=0, decay_steps=0, final_ratio=0, weight_decay=0
        )
        for field in ("beta1", "beta2"):
            value = getattr(self, field)
            require(0 <= value < 1, f"optimizer.{field} is {value}; it must lie in [0, 1).")
        for field in ("epsilon", "clip_norm"):
            value = getattr(self, field)
            require(0 < value < math.inf, f"optimizer.{field} is {value}; it must be positive and finite.")
        require(
            (self.decay_steps > 0) == (self.schedule == "wsd"),
            f"optimizer.decay_steps is {self.decay_steps} with schedule {self.schedule!r}; it is the length of the "
            "decay of 'wsd', at least 1 there and 0 for the others.",
        )


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: `kernel + alpha / rank * a @ b` for every layer's `targets`, with only `a` and `b` trained.

    `rank` 0 turns it off: all parameters are trained. `dtype` is the type the adapters are stored in.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    dtype: str = "float32"

    def __post_init__(self) -> None:
        require_types("lora", self)
        require_minimum("lora", self, rank=0)
        require(0 < self.alpha < math.inf, f"lora.alpha is {self.alpha}; it must be positive and finite.")
        require_choice("lora.dtype", self.dtype, DTYPES[:2])
        for name in self.targets:
            require_choice("lora.targets", name, PROJECTIONS)
        require(len(set(self.targets)) == len(self.targets), f"lora.targets is {self.targets}; name each once.")
        require(
            self.rank == 0 or len(self.targets) > 0,
            f"lora.targets is empty with lora.rank {self.rank}; name what to adapt: {', '.join(PROJECTIONS)}.",
        )
        unused = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        require(
            self.rank > 0 or not unused,
            f"lora.rank is 0, which turns adapters off, but lora.{' and lora.'.join(unused)} is set; give a rank of at "
            "least 1.",
        )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint every `save_every` steps and at the end. Of these stay the newest `keep`, those of steps that
    `keep_every` divides (0: none), and the `keep_best` with the best `best_metric`: a number of an evaluation such as
    `eval_loss`, for which less is better, or `exact_match` and `tokens_per_forward`, for which more is. Only
    checkpoints of steps that were evaluated compete.

    A run refuses to continue from a checkpoint of other data unless `accept_changed_data`.
    """

    save_every: int = 1_000
    keep: int = 2
    keep_every: int = 0
    keep_best: int = 0
    best_metric: str = "eval_loss"
    accept_changed_data: bool = False

    def __post_init__(self) -> None:
        require_types("checkpoint", self)
        require_minimum("checkpoint", self, save_every=1, keep=1, keep_every=0, keep_best=0)
        require_choice("checkpoint.best_metric", self.best_metric, (*LESS_IS_BETTER, *MORE_IS_BETTER))


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; one may be -1, "the rest". Batches are split over `data` and `fsdp`, parameters
    over `fsdp` and `tensor`. Of several slices each has a part of `data`.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1

    def __post_init__(self) -> None:
        require_types("mesh", self)
        for field, value in dataclasses.asdict(self).items():
            require(value == -1 or value >= 1, f"mesh.{field} is {value}; give a number of devices or -1 (the rest).")
        rest = [f"mesh.{field}" for field, value in dataclasses.asdict(self).items() if value == -1]
        require(len(rest) <= 1, f"{' and '.join(rest)} are -1; only one can be the rest.")


def setting(default: Any, help_text: str) -> Any:
    """A field with a default and a line of help, which command lines show."""
    return dataclasses.field(default=default, metadata={"help": help_text})


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How one response is decoded (paper section 3, and our self-correcting loop).

    `gen_length` is rounded up to whole slots of `slot_size` tokens and cut into `serial_num_blocks` equal blocks of
    whole slots, decoded one after another. A slot is drafted when the probability of its first token exceeds
    `slot_threshold`; a drafted token stands when its next-token probability exceeds `token_threshold`. `redraft`
    (self_correcting only) sends rejected slots back for a fresh draft. `carry_threshold` says when a verification also
    computes the next draft: when the joint probability of its drafts exceeds it.

    `temperature` 0 is greedy; `top_k` and `top_p` restrict what a positive temperature draws from and, like the
    suppressed tokens, change proposals only: thresholds always compare with the unfiltered distribution. A response
    ends before the first of the texts in `stop`.
    """

    algorithm: str = setting("self_correcting", "self_correcting, or paper: the published decoding")
    gen_length: int = setting(64, "response tokens, rounded up to whole slots; templates have their holes instead")
    slot_size: int = setting(16, "tokens per slot")
    serial_num_blocks: int = setting(1, "equal parts of the response, decoded one after another")
    slot_threshold: float = setting(0.9, "a slot is drafted when its score, in [0, 1], is above")
    token_threshold: float = setting(0.9, "a drafted token stands when its probability is above")
    redraft: bool = setting(False, "fresh drafts instead of repairs for rejected slots (self_correcting)")
    carry_threshold: float = setting(
        0.0, "verify and draft in one forward when the drafts' joint probability is above; 0 always, 1 never"
    )
    temperature: float = setting(0.0, "0 is greedy; above, Gumbel-max sampling")
    top_k: int = setting(-1, "sample among so many most probable tokens; -1 for all")
    top_p: float = setting(1.0, "sample among the most probable tokens that make up this share")
    suppress_special: bool = setting(False, "never propose the mask and pad tokens")
    suppress_ids: tuple[int, ...] = setting((), "token IDs that are never proposed")
    stop: tuple[str, ...] = setting((), "the response ends before any of these texts")

    def __post_init__(self) -> None:
        require_types("decode", self)
        require_choice("decode.algorithm", self.algorithm, ALGORITHMS)
        require_minimum("decode", self, gen_length=1, slot_size=1, serial_num_blocks=1, temperature=0)
        require(
            self.temperature <= MAX_TEMPERATURE,
            f"decode.temperature is {self.temperature!r}; above {MAX_TEMPERATURE} nothing but noise decides: lower it.",
        )
        for field in ("slot_threshold", "token_threshold", "carry_threshold"):
            value = getattr(self, field)
            require(0 <= value <= 1, f"decode.{field} is {value!r}; a probability threshold must lie in [0, 1].")
        require(
            self.top_k == -1 or self.top_k >= 1,
            f"decode.top_k is {self.top_k!r}; it must be at least 1, or -1 for no limit.",
        )
        require(0 < self.top_p <= 1, f"decode.top_p is {self.top_p!r}; it must lie in (0, 1].")
        for token in self.suppress_ids:
            require(token >= 0, f"decode.suppress_ids holds {token}; token IDs are not negative.")
        require(all(self.stop), "decode.stop holds an empty text, which would end every response; leave it out.")
        num_slots = self.rounded_length // self.slot_size
        if num_slots % self.serial_num_blocks:
            divisors = [d for d in range(1, min(num_slots, 1000) + 1) if num_slots % d == 0]
            unit = self.slot_size * self.serial_num_blocks
            lower, upper = self.rounded_length // unit * unit, -(-self.rounded_length // unit) * unit
            lengths = " or ".join(str(length) for length in (lower, upper) if length)
            raise ConfigError(
                f"decode.gen_length {self.gen_length} is {num_slots} slots of {self.slot_size}, which "
                f"{self.serial_num_blocks} serial blocks cannot share equally: use gen_length {lengths}, or "
                f"serial_num_blocks {', '.join(map(str, divisors))}."
            )

    @property
    def rounded_length(self) -> int:
        """`gen_length` rounded up to whole slots, in tokens."""
        return -(-self.gen_length // self.slot_size) * self.slot_size

    @property
    def block_length(self) -> int:
        """Tokens in one serial block."""
        return self.rounded_length // self.serial_num_blocks


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment: what `configs/NAME.py` returns, the command line edits, and a run directory's `config.json`
    holds.
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    slots: SlotsConfig = dataclasses.field(default_factory=SlotsConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        positions = f"model.max_position_embeddings ({self.model.max_position_embeddings}"
        positions += ")" if self.model.rope_scaling == 1 else f" x rope_scaling {self.model.rope_scaling:g})"
        factor = math.ceil(100 * self.data.max_length / self.model.max_position_embeddings) / 100
        require(
            self.data.max_length <= self.model.context_length,
            f"data.max_length is {self.data.max_length}, beyond {positions}; lower the one or raise the other, or "
            f"stretch positions with model.rope_scaling {factor:g}.",
        )
        require(
            self.decode.rounded_length < self.model.context_length,
            f"decode.gen_length is {self.decode.gen_length}, in whole slots {self.decode.rounded_length}; with a "
            f"prompt that exceeds model.max_position_embeddings, {self.model.context_length}: lower one or "
            "raise the other.",
        )
        self._check_objective()
        steps = self.train.steps or math.inf  # of passes it is not known yet
        require(
            self.optimizer.warmup_steps <= steps,
            f"optimizer.warmup_steps is {self.optimizer.warmup_steps}, more than train.steps ({self.train.steps}); "
            "lower it.",
        )
        evaluated = self.train.eval_every > 0 and (
            self.checkpoint.best_metric in LESS_IS_BETTER or self.train.eval_decode_examples > 0
        )
        require(
            self.checkpoint.keep_best == 0 or evaluated,
            f"checkpoint.keep_best is {self.checkpoint.keep_best}, but {self.checkpoint.best_metric} is not measured "
            "on the way; set train.eval_every, and for decoded metrics train.eval_decode_examples.",
        )
        require(
            max(self.train.profile_steps, default=0) <= steps,
            f"train.profile_steps is {self.train.profile_steps}, beyond train.steps ({self.train.steps}).",
        )
        require(
            self.lora.rank == 0 or bool(self.train.init_from),
            f"lora.rank is {self.lora.rank} without train.init_from; name the run or directory whose weights to adapt.",
        )
        decay = self.optimizer.decay_steps
        require(
            self.optimizer.warmup_steps + decay <= steps,
            f"optimizer.warmup_steps ({self.optimizer.warmup_steps}) and optimizer.decay_steps ({decay}) are more than "
            f"train.steps ({self.train.steps}) together; lower one.",
        )

    def _check_objective(self) -> None:
        """Whether the objective has a loss, and the metric that chooses checkpoints."""
        objective, metric = self.train.objective, self.checkpoint.best_metric
        if objective == "hybrid":
            return
        for term in {"ar_loss", "mdm_loss"} - set(loss_terms(objective)):
            unused = term.replace("loss", "weight")
            require(
                getattr(self.slots, unused) == getattr(SlotsConfig, unused),
                f"slots.{unused} is {getattr(self.slots, unused)}, but train.objective {objective!r} has no such loss; "
                "leave it out.",
            )
        require(
            self.slots.clean_order == SlotsConfig.clean_order,
            f"slots.clean_order is {self.slots.clean_order!r}, but train.objective {objective!r} has no clean slots; "
            "leave it out.",
        )
        weight = loss_terms(objective)[0].replace("loss", "weight")
        require(
            getattr(self.slots, weight) > 0,
            f"slots.{weight} is 0, but train.objective {objective!r} has no other loss; make it positive.",
        )
        require(
            self.checkpoint.keep_best == 0
            or not metric.startswith(("eval_ar_", "eval_mdm_"))
            or metric.startswith(f"eval_{loss_terms(objective)[0][:-5]}_"),
            f"checkpoint.best_metric is {metric!r}, which train.objective {objective!r} does not have; use "
            "'eval_nats_per_token'.",
        )
        blocks, length = max(self.slots.sizes), self.decode.gen_length
        require(
            objective != "block_diffusion" or not self.train.eval_decode_examples or length % blocks == 0,
            f"decode.gen_length is {length}, which blocks of {blocks}, the longest of slots.sizes, do not divide; "
            "change one, or decode nothing on the way with train.eval_decode_examples 0.",
        )


def loss_terms(objective: str) -> tuple[str, ...]:
    """Which of "ar_loss" and "mdm_loss" a training objective has."""
    return {"hybrid": ("ar_loss", "mdm_loss"), "autoregressive": ("ar_loss",)}.get(objective, ("mdm_loss",))


def to_dict(config: Any) -> dict[str, Any]:
    """Turns a config dataclass into plain JSON types (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(cls: type, values: Mapping[str, Any], path: str = "") -> Any:
    """Builds the config dataclass `cls` from plain values; lists become tuples, sections are built recursively.

    Raises:
      ConfigError: for an unknown field (naming the nearest), a value of the wrong type, or one that does not validate.
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    arguments = {}
    for name, value in values.items():
        full_name = f"{path}.{name}" if path else name
        if name not in fields:
            raise ConfigError(f"Unknown config field {full_name!r}.{nearest(name, fields)}")
        arguments[name] = _convert(fields[name], value, full_name)
    return cls(**arguments)


def _convert(kind: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        require(isinstance(value, Mapping), f"{name} is {value!r}; it must be a section of settings.")
        return from_dict(typing.cast(type, kind), value, name)
    if typing.get_origin(kind) is tuple:
        require(isinstance(value, list | tuple), f"{name} is {value!r}; it must be a list.")
        return tuple(_convert(typing.get_args(kind)[0], item, name) for item in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    require(type(value) is kind, f"{name} is {value!r}; it must be of type {kind.__name__}.")
    return value
