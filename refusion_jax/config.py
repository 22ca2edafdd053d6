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
MAX_TEMPERATURE = 1_000
DTYPES = ("float32", "bfloat16", "float16")
REMAT_POLICIES = ("none", "full")
SOURCES = ("synthetic", "json")
TOKENIZER_TYPES = ("char", "bpe", "unigram")


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


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    _require(value in choices, f"{field} is {value!r}, not one of {', '.join(choices)}.{hint}")


_KINDS: dict[Any, tuple[type, ...]] = {
    int: (numbers.Integral,),
    float: (numbers.Real,),
    bool: (bool, np.bool_),
    str: (str,),
}


def _require_types(section: str, config: Any) -> None:
    """Every plain field has its declared type; a whole number is no truth value, NumPy's scalars are welcome."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value, is_flag = getattr(config, name), isinstance(getattr(config, name), bool)
        if kind in _KINDS:
            ok = isinstance(value, _KINDS[kind]) and is_flag <= (kind is bool)
            _require(ok, f"{section}.{name} is {value!r}; it must be of type {kind.__name__}.")
        elif typing.get_origin(kind) is tuple:
            item = typing.get_args(kind)[0]
            ok = isinstance(value, tuple) and all(isinstance(each, _KINDS[item]) for each in value)
            _require(ok, f"{section}.{name} is {value!r}; it must be a tuple of {item.__name__}.")


def _require_minimum(section: str, config: Any, **minimums: float) -> None:
    for field, minimum in minimums.items():
        value = getattr(config, field)
        ok = math.isfinite(value) and value >= minimum
        _require(ok, f"{section}.{field} is {value!r}; it must be a number of at least {minimum}.")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and special tokens of a Qwen3 decoder. Field names follow Hugging Face's `config.json`.

    `vocab_size` 0 means "the tokenizer's", filled in by the trainer. `dtype` is the type of activations and matrix
    products, `param_dtype` that of stored parameters; softmax, norms, RoPE and losses are float32 regardless.
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
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    pad_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1,)
    mask_token_id: int = 2
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str = "none"
    scan_unroll: int = 1

    def __post_init__(self) -> None:
        _require_types("model", self)
        _require_minimum(
            "model", self, vocab_size=0, hidden_size=1, intermediate_size=1, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=2, max_position_embeddings=1, initializer_range=0, scan_unroll=1,
        )  # fmt: skip
        for field in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, field)
            _require(0 < value < math.inf, f"model.{field} is {value}; it must be positive and finite.")
        _require(self.head_dim % 2 == 0, f"model.head_dim is {self.head_dim}; RoPE rotates pairs, make it even.")
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"model.num_attention_heads is {self.num_attention_heads}, not a multiple of model.num_key_value_heads "
            f"({self.num_key_value_heads}); every key head serves the same number of query heads.",
        )
        _require_choice("model.dtype", self.dtype, DTYPES)
        _require_choice("model.param_dtype", self.param_dtype, DTYPES)
        _require_choice("model.remat", self.remat, REMAT_POLICIES)
        _require(len(self.eos_token_ids) > 0, "model.eos_token_ids is empty; a response needs a token that ends it.")
        for name, token in self.special_tokens:
            ok = token >= 0 and (self.vocab_size == 0 or token < self.vocab_size)
            _require(ok, f"model.{name} is {token}, outside the vocabulary of {self.vocab_size} tokens.")
        _require(
            self.mask_token_id not in self.eos_token_ids,
            f"model.mask_token_id is {self.mask_token_id}, which is also an EOS; the mask needs a token of its own.",
        )

    @property
    def special_tokens(self) -> list[tuple[str, int]]:
        """(field, token ID) of every special token."""
        eos = [("eos_token_ids", token) for token in self.eos_token_ids]
        return [("pad_token_id", self.pad_token_id), ("mask_token_id", self.mask_token_id), *eos]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where examples come from and how they become rows of tokens.

    `source` "synthetic" generates `synthetic_examples` little text tasks; "json" reads `train_files` (JSON lists or
    JSON lines with `prompt_field` and `response_field`). Held-out examples come from `eval_files`, or else the last
    `eval_examples` of the training files. A prompt plus response longer than `max_length` is dropped and counted.
    `max_length` is also the length of a packed row. `tokenizer` is a sentencepiece model file; "" trains one on the
    corpus.
    """

    source: str = "synthetic"
    train_files: tuple[str, ...] = ()
    eval_files: tuple[str, ...] = ()
    prompt_field: str = "query"
    response_field: str = "response"
    synthetic_examples: int = 100_000
    eval_examples: int = 400
    max_length: int = 128
    pack: bool = True
    tokenizer: str = ""
    tokenizer_type: str = "char"
    tokenizer_vocab_size: int = 1_000
    read_threads: int = 1
    prefetch: int = 8

    def __post_init__(self) -> None:
        _require_types("data", self)
        _require_choice("data.source", self.source, SOURCES)
        _require_choice("data.tokenizer_type", self.tokenizer_type, TOKENIZER_TYPES)
        _require_minimum(
            "data", self, synthetic_examples=1, eval_examples=0, max_length=2, tokenizer_vocab_size=8, read_threads=1,
            prefetch=1,
        )  # fmt: skip
        _require(
            self.prefetch >= self.read_threads,
            f"data.prefetch is {self.prefetch}, fewer batches than data.read_threads ({self.read_threads}); raise it.",
        )
        _require(
            self.source != "json" or len(self.train_files) > 0,
            "data.train_files is empty; data.source 'json' needs at least one file of examples.",
        )
        _require(
            bool(self.prompt_field) and bool(self.response_field) and self.prompt_field != self.response_field,
            f"data.prompt_field is {self.prompt_field!r} and data.response_field {self.response_field!r}; "
            "they must be two different field names.",
        )


@dataclasses.dataclass(frozen=True)
class SlotsConfig:
    """The training view's random draws and the weights of the two loss terms (paper section 3)."""

    sizes: tuple[int, ...] = (4, 8, 16, 32)
    epsilon: float = 1e-3
    ar_weight: float = 1.0
    mdm_weight: float = 1.0

    def __post_init__(self) -> None:
        _require_types("slots", self)
        _require(
            len(self.sizes) > 0 and all(isinstance(size, int) and size >= 1 for size in self.sizes),
            f"slots.sizes is {self.sizes}; give at least one slot size, each a whole number of at least 1.",
        )
        _require(0 < self.epsilon < 1, f"slots.epsilon is {self.epsilon}; it must lie strictly between 0 and 1.")
        _require_minimum("slots", self, ar_weight=0, mdm_weight=0)
        _require(
            self.ar_weight + self.mdm_weight > 0,
            "slots.ar_weight and slots.mdm_weight are both 0; one of the loss terms must count.",
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length and rhythm of a run. `batch_size` counts rows of `data.max_length` tokens over all devices: a packed row
    holds several examples. `eval_every` 0 evaluates only at the end; `eval_decode_examples` prompts are decoded each
    time to measure exact match."""

    steps: int = 1_000
    batch_size: int = 16
    seed: int = 0
    log_every: int = 50
    eval_every: int = 500
    eval_decode_examples: int = 64

    def __post_init__(self) -> None:
        _require_types("train", self)
        _require_minimum(
            "train", self, steps=1, batch_size=1, seed=0, log_every=1, eval_every=0, eval_decode_examples=0
        )
        _require(self.seed < 2**31, f"train.seed is {self.seed}; it must be below 2**31.")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay to `learning_rate * final_ratio`, after clipping by global norm."""

    learning_rate: float = 3e-3
    warmup_steps: int = 100
    final_ratio: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        _require_types("optimizer", self)
        _require_minimum("optimizer", self, learning_rate=0, warmup_steps=0, final_ratio=0, weight_decay=0)
        for field in ("beta1", "beta2"):
            value = getattr(self, field)
            _require(0 <= value < 1, f"optimizer.{field} is {value}; it must lie in [0, 1).")
        for field in ("epsilon", "clip_norm"):
            value = getattr(self, field)
            _require(0 < value < math.inf, f"optimizer.{field} is {value}; it must be positive and finite.")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint every `save_every` steps and at the end; the newest `keep` stay."""

    save_every: int = 1_000
    keep: int = 2

    def __post_init__(self) -> None:
        _require_types("checkpoint", self)
        _require_minimum("checkpoint", self, save_every=1, keep=1)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; one may be -1, "the rest". Batches are split over `data` and `fsdp`, parameters
    over `fsdp` and `tensor`. Of several slices each has a part of `data`.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1

    def __post_init__(self) -> None:
        _require_types("mesh", self)
        for field, value in dataclasses.asdict(self).items():
            _require(value == -1 or value >= 1, f"mesh.{field} is {value}; give a number of devices or -1 (the rest).")
        rest = [f"mesh.{field}" for field, value in dataclasses.asdict(self).items() if value == -1]
        _require(len(rest) <= 1, f"{' and '.join(rest)} are -1; only one can be the rest.")


def _setting(default: Any, help_text: str) -> Any:
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

    algorithm: str = _setting("self_correcting", "self_correcting, or paper: the published decoding")
    gen_length: int = _setting(64, "response tokens, rounded up to whole slots; templates have their holes instead")
    slot_size: int = _setting(16, "tokens per slot")
    serial_num_blocks: int = _setting(1, "equal parts of the response, decoded one after another")
    slot_threshold: float = _setting(0.9, "a slot is drafted when its score, in [0, 1], is above")
    token_threshold: float = _setting(0.9, "a drafted token stands when its probability is above")
    redraft: bool = _setting(False, "fresh drafts instead of repairs for rejected slots (self_correcting)")
    carry_threshold: float = _setting(
        0.0, "verify and draft in one forward when the drafts' joint probability is above; 0 always, 1 never"
    )
    temperature: float = _setting(0.0, "0 is greedy; above, Gumbel-max sampling")
    top_k: int = _setting(-1, "sample among so many most probable tokens; -1 for all")
    top_p: float = _setting(1.0, "sample among the most probable tokens that make up this share")
    suppress_special: bool = _setting(False, "never propose the mask and pad tokens")
    suppress_ids: tuple[int, ...] = _setting((), "token IDs that are never proposed")
    stop: tuple[str, ...] = _setting((), "the response ends before any of these texts")

    def __post_init__(self) -> None:
        _require_types("decode", self)
        _require_choice("decode.algorithm", self.algorithm, ALGORITHMS)
        _require_minimum("decode", self, gen_length=1, slot_size=1, serial_num_blocks=1, temperature=0)
        _require(
            self.temperature <= MAX_TEMPERATURE,
            f"decode.temperature is {self.temperature!r}; above {MAX_TEMPERATURE} nothing but noise decides: lower it.",
        )
        for field in ("slot_threshold", "token_threshold", "carry_threshold"):
            value = getattr(self, field)
            _require(0 <= value <= 1, f"decode.{field} is {value!r}; a probability threshold must lie in [0, 1].")
        _require(
            self.top_k == -1 or self.top_k >= 1,
            f"decode.top_k is {self.top_k!r}; it must be at least 1, or -1 for no limit.",
        )
        _require(0 < self.top_p <= 1, f"decode.top_p is {self.top_p!r}; it must lie in (0, 1].")
        for token in self.suppress_ids:
            _require(token >= 0, f"decode.suppress_ids holds {token}; token IDs are not negative.")
        _require(all(self.stop), "decode.stop holds an empty text, which would end every response; leave it out.")
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
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        _require(
            self.data.max_length <= self.model.max_position_embeddings,
            f"data.max_length is {self.data.max_length}, beyond model.max_position_embeddings "
            f"({self.model.max_position_embeddings}); lower the one or raise the other.",
        )
        _require(
            self.decode.rounded_length < self.model.max_position_embeddings,
            f"decode.gen_length is {self.decode.gen_length}, in whole slots {self.decode.rounded_length}; with a "
            f"prompt that exceeds model.max_position_embeddings, {self.model.max_position_embeddings}: lower one or "
            "raise the other.",
        )
        _require(
            self.optimizer.warmup_steps <= self.train.steps,
            f"optimizer.warmup_steps is {self.optimizer.warmup_steps}, more than train.steps ({self.train.steps}); "
            "lower it.",
        )


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
        _require(isinstance(value, Mapping), f"{name} is {value!r}; it must be a section of settings.")
        return from_dict(typing.cast(type, kind), value, name)
    if typing.get_origin(kind) is tuple:
        _require(isinstance(value, list | tuple), f"{name} is {value!r}; it must be a list.")
        return tuple(_convert(typing.get_args(kind)[0], item, name) for item in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    _require(type(value) is kind, f"{name} is {value!r}; it must be of type {kind.__name__}.")
    return value
