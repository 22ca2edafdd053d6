"""How probable a model finds given responses: `log_likelihood`."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from refusion_jax.api import Model
from refusion_jax.config import ConfigError
from refusion_jax.decoding.batching import beside, bucket
from refusion_jax.decoding.layout import check_tokens
from refusion_jax.decoding.memory import fitting_rows
from refusion_jax.methods import OBJECTIVE_OF, methods_of
from refusion_jax.prompts import brief, encode, is_whole
from refusion_jax.scoring import ALL_MASKED, Rows, score
from refusion_jax.sharding import row_shares, shared_rows

LEFT_TO_RIGHT, BOUND = ESTIMATES = ("left_to_right", "bound")
MIN_LENGTH_BUCKET = 32
MOST_DRAWS = 1_000_000

_EXACT = ("hybrid", "autoregressive")
_AT_PLACE_BEFORE = ("autoregressive", "dream")  # a token is predicted at the place before it, which has to be there


@dataclasses.dataclass(frozen=True)
class LogLikelihood:
    """Log-likelihoods of responses, one entry per request.

    Attributes:
      values: in nats, of the whole response given its prompt; exact, or a lower bound's estimate.
      is_greedy: whether every token of the response is the most probable one where it is predicted, see
        `log_likelihood`; true of an empty response.
      standard_errors: of `values`, in nats: of the mean over draws, as if they were independent; the grid that they are
        taken from makes the true ones rather smaller. 0.0 where nothing is random, NaN of a single draw.
      num_tokens: of the response.
      estimate: "left_to_right" or "bound".
    """

    values: list[float]
    is_greedy: list[bool]
    standard_errors: list[float]
    num_tokens: list[int]
    estimate: str


@dataclasses.dataclass(frozen=True)
class _Reading:
    """How a model's likelihood is read: the objective taken for its own, the estimate, tokens of a slot or block."""

    objective: str
    estimate: str
    size: int

    def is_random(self, response_length: int) -> bool:
        """Whether the estimate differs between draws: some group of units has more than one."""
        if self.estimate == LEFT_TO_RIGHT:
            return False
        if self.objective == "block_diffusion":
            return min(self.size, response_length) > 1
        return response_length > self.size


@dataclasses.dataclass(frozen=True, eq=False)
class _Request:
    index: int
    prompt: list[int]
    response: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


class _Result(NamedTuple):
    value: float
    is_greedy: bool
    standard_error: float


@dataclasses.dataclass(frozen=True)
class _Options:
    """What a pass over requests is run with."""

    batch_size: int | str
    seed: int
    num_draws: int


def log_likelihood(
    model: Model,
    prompts: Iterable[str | Sequence[int]],
    responses: Iterable[str | Sequence[int]],
    *,
    estimate: str | None = None,
    slot_size: int | None = None,
    num_draws: int = 128,
    seed: int = 0,
    batch_size: int | str = 32,
    on_progress: Callable[[int], None] | None = None,
) -> LogLikelihood:
    """Log-likelihoods of responses given their prompts.

    "left_to_right" is exact, and takes one forward. Of "autoregressive" it is that of next tokens. Of "hybrid"
    (ReFusion) it is that of filling slots from left to right: a slot's first token is read at its mask, given the
    prompt and the slots before; the others are next tokens inside the slot.

    "bound" is a Monte-Carlo estimate of the evidence lower bound of masked diffusion. With the response cut into `n`
    units,

        -log p(response | prompt) <= E_m E_M [ n / m * sum over tokens of the masked units M of cross-entropy ],

    where `m` is uniform in 1..n and `M` any `m` of the units, each set as likely as another. It equals
    `E_t [ 1/t * sum over masked tokens of cross-entropy ]` with `t ~ U(0, 1)` and each unit masked with probability `t`
    (LLaDA, arXiv 2502.09992, equations 4 and 6), with less variance. The draws' `m` are an equally spaced grid with one
    random offset, as in LLaDA's evaluation. Units are slots of "hybrid", whose clean ones stand in random order as in
    training (paper section 3); single tokens of "llada" and "dream"; of "block_diffusion" the tokens of each block,
    given the blocks before it, and the blocks' bounds add up (BD3-LM, arXiv 2503.09573, equation 8).

    A value depends on its request, `seed` and settings alone, up to rounding: not on the list, its order, or the batch.
    Draws are common to all requests, so that differences between responses to one prompt have less variance.

    Args:
      model: a loaded model. One of an unknown objective is taken for "hybrid", as `generate` does;
        `dataclasses.replace(model, objective="autoregressive")` says otherwise.
      prompts, responses: equally many texts, when the model has a tokenizer, or lists of token IDs. The two of a
        request are encoded each by itself, and nothing is added: whoever wants the EOS scored ends the response with
        it. A prompt may be empty, but not where a token is predicted at the place before it ("autoregressive",
        "dream").
      estimate: "left_to_right" ("hybrid", "autoregressive") or "bound" (all but "autoregressive"); by default the
        former where there is one.
      slot_size: tokens of a slot of "hybrid", by default `model.decode.slot_size`; or of a block of "block_diffusion",
        by default the longest that it was trained in.
      num_draws: forwards per request of "bound"; a response that is a single unit needs but one.
      seed: of the draws, in [0, 2**31).
      batch_size: forwards of rows at once, or "auto": as many as free memory holds, counted as for decoding. On a mesh
        it is rounded down to a multiple of the devices that rows are split over.
      on_progress: called with the number of finished requests, whenever another is.

    Returns:
      values and what belongs to them. `is_greedy` is read from the forward of "left_to_right" where the objective has
      one, whatever the estimate; else from one with the whole response masked, or of "block_diffusion" each block in
      turn, given those before it.

    Raises:
      ConfigError: for a request or setting that cannot be used, naming the request.
    """
    if not isinstance(model, Model):
        raise ConfigError(f"model is {brief(model)}; give what load() returns.")
    _check_settings(num_draws, seed, on_progress)
    reading = _read(model, estimate, slot_size)
    options = _Options(batch_size, int(seed), int(num_draws))
    _rows(model, batch_size, 1, 1)  # refuses a wrong one before any work
    requests = _requests(model, reading.objective, prompts, responses)
    found: dict[int, _Result] = {each.index: _Result(0.0, True, 0.0) for each in requests if not each.response}
    if found and on_progress is not None:
        on_progress(len(found))
    for index, result in _results(model, reading, [each for each in requests if each.response], options):
        found[index] = result
        if on_progress is not None:
            on_progress(len(found))
    results = [found[request.index] for request in requests]
    return LogLikelihood(
        values=[result.value for result in results],
        is_greedy=[result.is_greedy for result in results],
        standard_errors=[result.standard_error for result in results],
        num_tokens=[len(request.response) for request in requests],
        estimate=reading.estimate,
    )


def _check_settings(num_draws: Any, seed: Any, on_progress: Any) -> None:
    if not is_whole(num_draws) or not 1 <= num_draws <= MOST_DRAWS:
        raise ConfigError(f"num_draws is {brief(num_draws)}; it must be a whole number in [1, {MOST_DRAWS:,}].")
    if not is_whole(seed) or not 0 <= seed < 2**31:
        raise ConfigError(f"seed is {brief(seed)}; it must be a whole number in [0, 2**31).")
    if on_progress is not None and not callable(on_progress):
        raise ConfigError(f"on_progress is {brief(on_progress)}; give a function.")


def choose_estimate(model: Model, estimate: str | None = None) -> str:
    """The estimate that `log_likelihood` computes for a model: `estimate`, by default the exact one where there is one.

    Raises:
      ConfigError: for one that the model's objective does not have.
    """
    objective = _objective(model)
    if estimate not in (None, *ESTIMATES):
        raise ConfigError(
            f"estimate is {brief(estimate)}; it must be {' or '.join(map(repr, ESTIMATES))}, or left out."
        )
    if estimate == LEFT_TO_RIGHT and objective not in _EXACT:
        raise ConfigError(
            f"estimate is 'left_to_right', but the objective {objective!r} has no likelihood from left to right; use "
            "'bound'."
        )
    if estimate == BOUND and objective == "autoregressive":
        raise ConfigError(
            "estimate is 'bound', but the objective 'autoregressive' masks nothing, and its likelihood is exact; use "
            "'left_to_right'."
        )
    return estimate or (LEFT_TO_RIGHT if objective in _EXACT else BOUND)


def _objective(model: Model) -> str:
    return model.objective or OBJECTIVE_OF[methods_of("")[0]]


def _read(model: Model, estimate: Any, slot_size: Any) -> _Reading:
    chosen, objective = choose_estimate(model, estimate), _objective(model)
    size = _size(model, objective, slot_size)
    return _Reading(objective, chosen, min(size, model.config.context_length))  # a longer one has the same effect


def _size(model: Model, objective: str, slot_size: Any) -> int:
    if slot_size is not None and (not is_whole(slot_size) or slot_size < 1):
        raise ConfigError(f"slot_size is {brief(slot_size)}; it must be a whole number of at least 1, or left out.")
    if objective == "hybrid":
        return int(slot_size or model.decode.slot_size)
    if objective != "block_diffusion":
        if slot_size is not None:
            raise ConfigError(
                f"slot_size is {slot_size}, but the objective {objective!r} has neither slots nor blocks; leave it out."
            )
        return 1
    known = model.block_lengths
    if slot_size is None and not known:
        raise ConfigError("It is not known in which blocks the model was trained; give their length as slot_size.")
    if slot_size is not None and known and slot_size not in known:
        raise ConfigError(
            f"slot_size is {slot_size}, but the model was trained in blocks of {', '.join(map(str, sorted(known)))}; "
            "use one of these, or leave it out."
        )
    return int(slot_size or max(known))


def _requests(model: Model, objective: str, prompts: Any, responses: Any) -> list[_Request]:
    """The requests in token IDs.

    Raises:
      ConfigError: for one that cannot be scored, naming it.
    """
    listed = []
    for name, given in (("prompts", prompts), ("responses", responses)):
        if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
            raise ConfigError(
                f"{name} is {brief(given)}, no list; give a list of texts or token-ID lists, also of one."
            )
        listed.append(list(given))
        if any(is_whole(each) for each in listed[-1]):
            raise ConfigError(f"{name} is a single list of token IDs; give a list of such lists.")
    if len(listed[0]) != len(listed[1]):
        raise ConfigError(f"{len(listed[0])} prompts for {len(listed[1])} responses; give one prompt per response.")
    made = []
    for index, texts in enumerate(zip(*listed, strict=True)):
        try:
            request = _Request(
                index, *(_encode(model, *each) for each in zip(texts, ("prompt", "response"), strict=True))
            )
            _check_request(model, objective, request)
        except ConfigError as error:
            raise ConfigError(f"Request {index}: {error}") from error
        made.append(request)
    return made


def _encode(model: Model, text: Any, name: str) -> list[int]:
    if not isinstance(text, str | Sequence) and np.ndim(text) != 1:
        raise ConfigError(f"The {name} is {brief(text)}; give a text or a list of token IDs.")
    tokens = encode(model.tokenizer, text, f"The {name}")
    check_tokens(tokens, f"{name.capitalize()} token", model.config)
    return tokens


def _check_request(model: Model, objective: str, request: _Request) -> None:
    if request.length > model.config.context_length:
        raise ConfigError(
            f"The prompt has {len(request.prompt)} tokens and the response {len(request.response)}, together more than "
            f"the model's {model.config.context_length} positions; shorten one of them."
        )
    if objective in _AT_PLACE_BEFORE and request.response and not request.prompt:
        raise ConfigError(
            f"The prompt is empty, but the objective {objective!r} predicts a token at the place before it, so that "
            "nothing predicts the first; give a prompt of at least one token, such as the EOS."
        )


def _results(
    model: Model, reading: _Reading, requests: list[_Request], options: _Options
) -> Iterator[tuple[int, _Result]]:
    """Indices and results of requests, as they are finished."""
    is_greedy = {}
    if (reading.objective, reading.estimate) == ("hybrid", BOUND):
        exact = dataclasses.replace(reading, estimate=LEFT_TO_RIGHT)
        for request, _, greedy in _scores(model, exact, requests, range(1), options):
            is_greedy[request.index] = greedy
    # Without an exact likelihood one more forward, with all masked, tells what is greedy.
    first = 0 if reading.objective in _EXACT else ALL_MASKED
    for request, nats, greedy in _scores(model, reading, requests, range(first, options.num_draws), options):
        is_random = reading.is_random(len(request.response))
        of_draws = nats[-options.num_draws :] if is_random else nats[:1]
        error = _standard_error(of_draws) if is_random else 0.0
        yield request.index, _Result(-float(of_draws.mean()), is_greedy.get(request.index, greedy), error)


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


def _scores(
    model: Model, reading: _Reading, requests: list[_Request], numbers: range, options: _Options
) -> Iterator[tuple[_Request, np.ndarray, bool]]:
    """The nats that the forwards of each request find, and whether its first one calls the response greedy.

    Requests are taken by buckets of their lengths, short ones first. Each has a forward for every one of the draws'
    `numbers`, or for the first alone where nothing is random.
    """
    most = model.config.context_length
    of_request = {each.index: numbers if reading.is_random(len(each.response)) else numbers[:1] for each in requests}
    ordered = sorted(requests, key=lambda request: request.length)
    for length, group in itertools.groupby(
        ordered, lambda request: min(bucket(request.length, MIN_LENGTH_BUCKET), most)
    ):
        members = list(group)
        pairs = [(request, number) for request in members for number in of_request[request.index]]
        of_rows = _row_scores(model, reading, pairs, length, options)
        for request in members:
            nats, greedy = zip(*itertools.islice(of_rows, len(of_request[request.index])), strict=True)
            yield request, np.array(nats, np.float64), bool(greedy[0])


def _row_scores(
    model: Model, reading: _Reading, pairs: list[tuple[_Request, int]], length: int, options: _Options
) -> Iterator[tuple[float, bool]]:
    """What `score` finds for pairs of requests and draws, batch by batch; the last one has idle rows."""
    count = _rows(model, options.batch_size, length, len(pairs))
    way = reading.objective, reading.estimate
    for start in range(0, len(pairs), count):
        batch = pairs[start : start + count]
        inputs = _fill(batch, count, length, model.config.pad_token_id)
        with contextlib.nullcontext() if model.mesh is None else jax.set_mesh(model.mesh):
            draws = np.int32(options.seed), np.int32(options.num_draws)
            placed = beside(model.params, (inputs, *draws))
            found = jax.device_get(score(model.module, way, reading.size, model.params, *placed))
        yield from itertools.islice(zip(*found, strict=True), len(batch))


def _fill(pairs: list[tuple[_Request, int]], count: int, length: int, pad_token_id: int) -> Rows:
    """Lays requests out as arrays; rows beyond them are empty."""
    tokens = np.full((count, length), pad_token_id, np.int32)
    sizes = np.zeros((3, count), np.int32)
    for row, (request, number) in enumerate(pairs):
        tokens[row, : request.length] = request.prompt + request.response
        sizes[:, row] = len(request.prompt), len(request.response), number
    arrays: Any = (tokens, *sizes)
    return Rows(*arrays)


def _rows(model: Model, batch_size: Any, length: int, needed: int) -> int:
    """Rows of a batch, at most as many as `needed` rounded up to a bucket.

    Raises:
      ConfigError: for a batch size that is no number, or too small for the mesh.
    """
    if batch_size == "auto":
        rows = fitting_rows(model.config, length, length, mesh=model.mesh)
    elif not is_whole(batch_size) or batch_size < 1:
        raise ConfigError(f"batch_size is {brief(batch_size)}; score at least one row at once, or say 'auto'.")
    else:
        rows = shared_rows(model.mesh, int(batch_size))
    return min(rows, bucket(needed, row_shares(model.mesh)))
