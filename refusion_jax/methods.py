"""How the systems that ReFusion is compared with decode: left to right, masked diffusion, block diffusion.

`DecodeConfig` says what a response is asked for: its length, temperature, stop texts. A `Method` says how one of the
other systems computes it:

| name              | objective         | decoding                                                              |
| ----------------- | ----------------- | --------------------------------------------------------------------- |
| `refusion`        | `hybrid`          | slots, as `DecodeConfig` says                                         |
| `autoregressive`  | `autoregressive`  | left to right on a KV buffer, one token per forward                   |
| `llada`           | `llada`           | masks in any order, attention in both directions                      |
| `dream`           | `dream`           | the same, but a position predicts the token after it                  |
| `block_diffusion` | `block_diffusion` | block after block on a KV buffer, the masks of a block in any order   |

Fast-dLLM is `llada` or `dream` with a `threshold` or a `factor`, and a `cache`.
"""

import dataclasses
from typing import Any

from refusion_jax.config import (
    OBJECTIVES,
    ConfigError,
    DecodeConfig,
    require,
    require_choice,
    require_minimum,
    require_types,
    setting,
)

METHODS = ("refusion", "autoregressive", "llada", "dream", "block_diffusion")
ORDERINGS = ("confidence", "entropy", "margin", "random")
CACHES = ("none", "prefix", "dual")
UNCONDITIONAL = ("mask", "empty")
MIN_THRESHOLD, MAX_FACTOR = 1e-30, 100_000  # what is less, and more, makes no difference or no number in float32
CHOICES = {"name": METHODS, "ordering": ORDERINGS, "cache": CACHES, "unconditional": UNCONDITIONAL}
OBJECTIVE_OF = dict(zip(METHODS, OBJECTIVES, strict=True))
METHOD_OF = dict(zip(OBJECTIVES, METHODS, strict=True))

# Settings of `DecodeConfig` that mean something to ReFusion's decoders alone.
SLOT_SETTINGS = (
    "algorithm", "slot_size", "serial_num_blocks", "slot_threshold", "token_threshold", "redraft", "carry_threshold",
)  # fmt: skip
UNKNOWN = "unknown"  # what the objective of a checkpoint is called that does not tell it

_MASKED = ("llada", "dream")
_DIFFUSION = (*_MASKED, "block_diffusion")
_METHODS_WITH: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("block_length", "steps", "ordering", "threshold", "factor"), _DIFFUSION),
    **dict.fromkeys(("cache", "guidance", "unconditional"), _MASKED),
}


@dataclasses.dataclass(frozen=True)
class Method:
    """How a response is computed by another system than ReFusion.

    The response is cut into blocks of `block_length` tokens, decoded one after another (0: one block; of
    `block_diffusion` the longest that the model was trained with). In each step one forward proposes a token for every
    mask, and some masks of the block become what is proposed, those first of which `ordering` says the model is surest:

      confidence   the proposal's probability: LLaDA's low-confidence remasking, Dream's maskgit-plus
      entropy      1 - entropy / log(vocabulary)
      margin       the lead of the most probable token over the second: Dream's top-k margin
      random       any

    How many is as if `steps` forwards shared the response equally (0: one token per step, as many as tokens), an equal
    number for every block, the earlier steps of a block taking what is left over. Or, in Fast-dLLM's two ways, as many
    as the model is sure of and at least one: all with a score of at least `threshold`; or the largest number `n` for
    which the `n`-th best score `c` has `(n + 1) * (1 - c) < factor`. 0 turns either off.

    `cache` keeps keys and values that a later forward would change: after one forward over everything at a block's
    begin, further ones compute the block and what is behind it ("prefix") or the block alone ("dual").

    `guidance` w > 0 mixes the logits with those of an `unconditional` prompt, `u + (w + 1) * (c - u)`: the prompt
    replaced by masks ("mask"), or no prompt ("empty").
    """

    name: str = setting("refusion", "how to decode; by default as the checkpoint was trained for")
    block_length: int = setting(
        0,
        "response tokens per block, one block after another; 0: one block, of block_diffusion the longest it learned",
    )
    steps: int = setting(0, "forwards per response; 0: one token each")
    ordering: str = setting("", "what tells of which mask the model is surest; by default entropy for dream, else "
                                "confidence")  # fmt: skip
    threshold: float = setting(0.0, "reveal every mask with at least this score, at least one; 0: off")
    factor: float = setting(0.0, "reveal the n best masks with (n + 1) * (1 - score) below this; 0: off")
    cache: str = setting("none", "keep keys and values within a block: of what is before it, or of all around it")
    guidance: float = setting(0.0, "strength of classifier-free guidance; 0: off")
    unconditional: str = setting("", "what guidance compares with: the prompt as masks, or no prompt")

    def __post_init__(self) -> None:
        require_types("method", self)
        require_choice("method.name", self.name, METHODS)
        for field, methods in _METHODS_WITH.items():
            default = type(self).__dataclass_fields__[field].default
            require(
                self.name in methods or getattr(self, field) == default,
                f"method.{field} is {getattr(self, field)!r}, but method.name is {self.name!r}; it belongs to "
                f"{', '.join(methods)}: leave it out.",
            )
        require_minimum("method", self, block_length=0, steps=0, threshold=0, factor=0, guidance=0)
        require(
            self.threshold == 0 or MIN_THRESHOLD <= self.threshold <= 1,
            f"method.threshold is {self.threshold!r}; a score lies in [0, 1]: give 0 for none, or at least "
            f"{MIN_THRESHOLD}.",
        )
        for field in ("factor", "guidance"):
            value = getattr(self, field)
            require(value <= MAX_FACTOR, f"method.{field} is {value!r}; it can be at most {MAX_FACTOR:,}: lower it.")
        if self.ordering:
            require_choice("method.ordering", self.ordering, ORDERINGS)
        require_choice("method.cache", self.cache, CACHES)
        ways = [name for name in ("steps", "threshold", "factor") if getattr(self, name)]
        require(
            len(ways) <= 1,
            f"{' and '.join(f'method.{name}' for name in ways)} are set; each says how many tokens a step reveals: "
            "choose one.",
        )
        require(
            self.ordering != "random" or not (self.threshold or self.factor),
            "method.ordering is 'random', which has no scores for method.threshold or method.factor to compare with; "
            "choose another ordering, or give method.steps.",
        )
        self._check_guidance()

    def _check_guidance(self) -> None:
        if self.unconditional:
            require_choice("method.unconditional", self.unconditional, UNCONDITIONAL)
        require(
            self.guidance == 0 or bool(self.unconditional),
            f"method.guidance is {self.guidance:g} without an unconditional prompt to compare with; set "
            "method.unconditional to 'mask' (the prompt as masks) or 'empty' (no prompt).",
        )
        require(
            self.guidance > 0 or not self.unconditional,
            f"method.unconditional is {self.unconditional!r} without guidance; set method.guidance, or leave it out.",
        )
        require(
            self.guidance == 0 or self.cache == "none",
            f"method.guidance is {self.guidance:g} with method.cache {self.cache!r}; what is kept would have to be "
            "kept of both prompts: use cache 'none'.",
        )

    @property
    def objective(self) -> str:
        """The training objective it decodes models of."""
        return OBJECTIVE_OF[self.name]

    @property
    def scores(self) -> str:
        """The ordering in use."""
        return self.ordering or ("entropy" if self.name == "dream" else "confidence")

    def blocks(self, gen_length: int) -> tuple[int, int]:
        """(tokens of a block, steps of a block) for a response of so many tokens.

        Raises:
          ConfigError: when blocks or steps do not divide it evenly.
        """
        length = self.block_length or gen_length
        if gen_length % length:
            lower, upper = gen_length // length * length, -(-gen_length // length) * length
            lengths = " or ".join(str(each) for each in (lower, upper) if each)
            raise ConfigError(
                f"method.block_length is {length}, which does not divide gen_length ({gen_length}): use gen_length "
                f"{lengths}, or another block_length."
            )
        count, steps = gen_length // length, self.steps or gen_length
        if steps % count or not count <= steps <= gen_length:
            known = [count * each for each in range(1, length + 1)]
            shown = ", ".join(map(str, known if len(known) <= 12 else [*known[:6], "...", *known[-3:]]))
            raise ConfigError(
                f"method.steps is {steps}, which {count} block{'s' * (count > 1)} of {length} tokens cannot share "
                f"equally, with one to {length} steps each: use one of {shown}."
            )
        return length, steps // count


# Of `Method`, besides its name.
METHOD_SETTINGS = tuple(field.name for field in dataclasses.fields(Method) if field.name != "name")


def methods_of(objective: str) -> tuple[str, ...]:
    """Names of the methods for models of a training objective, "" where it is not known; the first is the default."""
    return (METHOD_OF[objective],) if objective else ("refusion", "autoregressive")


def choose_method(
    objective: str,
    method: Method | None = None,
    allow_objective: str | None = None,
    block_lengths: tuple[int, ...] = (),
) -> Method:
    """The method to decode a checkpoint with: `method`, or by default that of its training objective.

    Args:
      objective: what the checkpoint was trained with; "" where that is not known.
      method: what was asked for.
      allow_objective: the same objective once more, or "unknown", which allows any method and blocks of any length.
      block_lengths: of block diffusion, those it was trained with, as far as known; the longest is the default.

    Raises:
      ConfigError: for a method, or blocks, that the checkpoint was not trained for, another `allow_objective` than its
        own, or block diffusion in blocks of no known length.
    """
    known: Any = objective or UNKNOWN
    if allow_objective not in (None, known):
        raise ConfigError(
            f"allow_objective is {allow_objective!r}, but the checkpoint was trained with the objective {known!r}; "
            "say that one, or leave it out."
        )
    methods = methods_of(objective)
    if method is None:
        return _in_blocks(Method(methods[0]), block_lengths, allow_objective)
    chosen: Any = method
    if not isinstance(chosen, Method):
        raise ConfigError(f"method is {chosen!r}; give a Method, such as Method({methods[0]!r}).")
    if method.name not in methods and allow_objective is None:
        raise ConfigError(
            f"method is {method.name!r}, but the checkpoint was trained with the objective {known!r}; use "
            f"{' or '.join(map(repr, methods))}, or allow_objective={known!r} to decode it all the same."
        )
    return _in_blocks(method, block_lengths, allow_objective)


def _in_blocks(method: Method, block_lengths: tuple[int, ...], allow_objective: str | None) -> Method:
    if method.name != "block_diffusion":
        return method
    if not method.block_length:
        if not block_lengths:
            raise ConfigError(
                "method.block_length is 0, and it is not known in which blocks the checkpoint was trained; give their "
                "length."
            )
        return dataclasses.replace(method, block_length=max(block_lengths))
    if block_lengths and method.block_length not in block_lengths and allow_objective is None:
        raise ConfigError(
            f"method.block_length is {method.block_length}, but the checkpoint was trained in blocks of "
            f"{', '.join(map(str, sorted(block_lengths)))}; use one of these, or allow_objective='block_diffusion' to "
            "decode it all the same."
        )
    return method


def settings_of(config: DecodeConfig, method: Method) -> DecodeConfig:
    """What of `config` applies to a method: without slots, for any but "refusion".

    Raises:
      ConfigError: for the algorithm "paper", or a response that the method cannot cut into its blocks.
    """
    if method.name == "refusion":
        return config
    if config.algorithm == "paper":
        raise ConfigError(
            f"decode.algorithm is 'paper', which the method {method.name!r} does not have; leave it out, or use the "
            "method 'refusion'."
        )
    method.blocks(config.gen_length)
    return without_slots(config)


def without_slots(config: DecodeConfig) -> DecodeConfig:
    """The settings with slots of one token, so that no length is rounded, and what is about slots by default."""
    defaults: dict[str, Any] = {name: DecodeConfig.__dataclass_fields__[name].default for name in SLOT_SETTINGS}
    return dataclasses.replace(config, **defaults | {"slot_size": 1})
