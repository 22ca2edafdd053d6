"""A stream of prompts on a fixed batch: when rows finish, the next prompts take them over.

Batch, prompt length and response length are rounded up to a few buckets, so that another stream in the same buckets
compiles nothing. The compiled loop runs until enough rows are free for the next prompts; between two runs of it the
host collects what finished and has the next prompts prefilled into the free rows.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from refusion_jax.config import ConfigError, DecodeConfig, ModelConfig
from refusion_jax.decoding.generation import Answer, Generation, Row, Statistics, read_row
from refusion_jax.decoding.layout import Layout, Template, prepare_layout, suppressed_ids
from refusion_jax.decoding.refusion import (
    Program,
    Request,
    admit,
    decode_loop,
    empty_state,
    prefill_prefix,
    release,
)
from refusion_jax.decoding.rules import DEFAULT_RULES, Rules
from refusion_jax.modeling import KVCache, Transformer
from refusion_jax.sharding import check_rows, check_widths, replicated, row_shares

MIN_PROMPT_BUCKET = 32
MIN_RESPONSE_BUCKET = 64
MIN_WIDTH = 16
MANY_ROWS = 8
MIN_TOKENS = 64  # packing fewer tokens gains nothing
PACKED_QUARTERS = (2, 3)  # of the tokens that full rows would have
ROWS_PER_ADMISSION = 4  # one prefill fills this part of the rows, so that it always has the same shape
LEAST_GROUP = 32  # jobs worth compiling for
NO_LIMIT = 2**31 - 1


def _capacity(response_length: int) -> int:
    return bucket(response_length, MIN_RESPONSE_BUCKET)


def bucket(size: int, minimum: int) -> int:
    """The smallest power-of-two multiple of `minimum` that holds `size`."""
    while minimum < size:
        minimum *= 2
    return minimum


def query_shapes(rows: int, capacity: int, shares: int = 1) -> tuple[tuple[int, int], ...]:
    """The (tokens, width) pairs a decode is compiled for, cheapest first.

    Widths are powers of two. With several rows their queries differ in length, so each width also comes with fewer
    tokens than full rows would have: the dense layers then run on packed tokens. Not where rows are split over several
    devices (`shares`): tokens of one line would have to change places in every layer.
    """
    # Among many rows one with a longer query is always there.
    narrowest = min(MIN_WIDTH if rows < MANY_ROWS else 2 * MIN_WIDTH, bucket(capacity, MIN_WIDTH))
    widths = [narrowest * 2**i for i in range((bucket(capacity, narrowest) // narrowest).bit_length())]
    shapes = set()
    for width in widths:
        full = rows * width
        packed = (full * quarters // 4 for quarters in PACKED_QUARTERS)
        shapes.add((full, width))
        if shares == 1:
            shapes |= {(tokens, width) for tokens in packed if tokens >= max(width, MIN_TOKENS)}
    return tuple(sorted(shapes))


def beside(params: Any, arrays: Any) -> Any:
    """Puts arrays where the parameters are, if these are bound to devices: what is computed of both will be, too.

    Otherwise the first results would differ in this from what they were computed of, and compile everything again.
    """
    one = jax.tree.leaves(params)[0]
    if not isinstance(one, jax.Array) or not one.committed:
        return arrays
    sharding = one.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.device_put(arrays, sharding)


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One response to decode.

    Attributes:
      index, sample: the prompt's index and which of its samples this is; together they name the job.
      layout, config: what is asked for.
      seed: with index and sample, all that its random draws depend on.
    """

    index: int
    sample: int
    layout: Layout
    config: DecodeConfig
    seed: int = 0

    @property
    def name(self) -> tuple[int, int]:
        """What the job is called in a stream."""
        return self.index, self.sample


@dataclasses.dataclass
class Bounds:
    """What a `Stream` must be made for, by the names of its arguments: the largest of its jobs."""

    prompt_length: int = 1
    response_length: int = 1
    suppressed: int = 0
    sampling: bool = False
    infilling: bool = False

    @classmethod
    def of(cls, jobs: Iterable[tuple[Layout, DecodeConfig]]) -> "Bounds":
        """The bounds of jobs that are known by their layout and config."""
        bounds = cls()
        for layout, config in jobs:
            bounds.include(layout, config)
        return bounds

    def include(self, layout: Layout, config: DecodeConfig) -> None:
        """Widens the bounds so that a job fits."""
        self.prompt_length = max(self.prompt_length, layout.prompt_length)
        self.response_length = max(self.response_length, layout.response_length)
        self.suppressed = max(self.suppressed, len(config.suppress_ids) + 2 * config.suppress_special)
        self.sampling |= config.temperature > 0
        self.infilling |= config.algorithm == "paper"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a stream's programs are compiled for: everything rounded up to a few buckets.

    Attributes:
      prompt_length, capacity: tokens of a prompt, and of a response.
      suppressed: suppressed IDs of a row.
      admission: rows that one prefill fills.
    """

    prompt_length: int
    capacity: int
    suppressed: int
    admission: int

    @classmethod
    def of(cls, rows: int, prompt_length: int, response_length: int, suppressed: int, shares: int = 1) -> "Sizes":
        """The sizes of a stream of so many rows, from the largest of its jobs; `shares` devices have equally many."""
        return cls(
            bucket(prompt_length, MIN_PROMPT_BUCKET),
            _capacity(response_length),
            bucket(suppressed, 4) if suppressed else 0,
            shares * max(1, rows // shares // ROWS_PER_ADMISSION),
        )

    @property
    def buffer_length(self) -> int:
        """KV entries of a row."""
        return self.prompt_length + self.capacity


class Stream:
    """Decodes jobs on a fixed number of rows.

        stream = Stream(module, params, rows=16, prompt_length=100, response_length=64)
        stream.submit(job)
        while stream.busy:
            for answer in stream.advance():
                ...

    Args:
      module, params: the model.
      rows: responses decoded at once.
      prompt_length, response_length: the largest of any job, in tokens; rounded up to buckets.
      prefix: token IDs that stand before every prompt; their KV is computed once and shared by all rows.
      rules: the functions that decide.
      suppressed: the largest number of suppressed IDs of any job.
      sampling, infilling: whether any job has a temperature, or the algorithm "paper"; programs for neither are
        smaller.
      statistics: an object to add to.
      mesh: one of `sharding.make_mesh`, over which the parameters are split; rows and key heads are, too.

    Raises:
      ConfigError: when the mesh cannot split the rows, or the model, evenly.
    """

    def __init__(
        self,
        module: Transformer,
        params: Any,
        *,
        rows: int,
        prompt_length: int,
        response_length: int,
        prefix: Sequence[int] = (),
        rules: Rules = DEFAULT_RULES,
        suppressed: int = 0,
        sampling: bool = True,
        infilling: bool = True,
        statistics: Statistics | None = None,
        mesh: Mesh | None = None,
    ):
        self._mesh, self._shares = mesh, row_shares(mesh)
        if mesh is not None:
            check_rows(mesh, rows, "rows")
            check_widths(mesh, module.config)
        self.statistics = Statistics() if statistics is None else statistics
        self._measured = statistics is not None
        self._params, self._model = params, module.config
        sizes = Sizes.of(rows, prompt_length, response_length, suppressed, self._shares)
        self._prompt_length, self._capacity = sizes.prompt_length, sizes.capacity
        self._suppressed, self._admission = sizes.suppressed, sizes.admission
        shapes = query_shapes(rows, self._capacity, self._shares)
        self._program = Program(module, shapes, rules, sampling, infilling, split=mesh is not None)
        self._jobs: list[Job | None] = [None] * rows
        self._waiting: collections.deque[Job] = collections.deque()
        self._reasons: dict[tuple[int, int], str] = {}
        with self.statistics.timed("prefill_seconds"):
            self._prefix = self._prefill_prefix(prefix) if len(prefix) else None
            self._offset = len(prefix)
            request = jax.device_put(self._lay_out([], rows))
            with self._on_mesh():
                state = empty_state(self._program, rows, self._capacity, sizes.buffer_length)
            if mesh is None:
                self._request, self._state = beside(params, (request, state))
            else:
                self._request, self._state = jax.device_put(request, replicated(mesh)), state

    def submit(self, job: Job) -> None:
        """Puts a job in line.

        Raises:
          ConfigError: when it exceeds what the stream was made for.
        """
        for what, has, most in (
            ("prompt_length", job.layout.prompt_length, self._prompt_length),
            ("response_length", job.layout.response_length, self._capacity),
            ("suppressed", len(suppressed_ids(job.config, self._model)), self._suppressed),
        ):
            if has > most:
                raise ConfigError(f"The stream was made for {what} {most}, too little for {has}; make it larger.")
        if (job.config.temperature > 0) > self._program.sampling:
            raise ConfigError("The stream was made for greedy jobs; make it with sampling=True.")
        if (job.config.algorithm == "paper") > self._program.infilling:
            raise ConfigError('The stream was made without algorithm "paper"; make it with infilling=True.')
        self._waiting.append(job)

    def cancel(self, name: tuple[int, int], reason: str = "cancelled") -> None:
        """Ends a job early: `advance` gives its answer as far as it came, with `reason` as its finish_reason.

        A job that is finished, or unknown, is left alone.
        """
        if any(job.name == name for job in self._unfinished()):
            self._reasons[name] = reason

    @property
    def busy(self) -> bool:
        """Whether any job has not been answered."""
        return next(self._unfinished(), None) is not None

    @property
    def has_stops(self) -> bool:
        """Whether any unfinished job has a stop text, which only the host can see."""
        return any(job.config.stop for job in self._unfinished())

    @property
    def room(self) -> int:
        """How many more jobs would start at once or wait for the next free rows."""
        return max(0, self._jobs.count(None) + self._admission - len(self._waiting))

    def advance(
        self, most_iterations: int = NO_LIMIT, observe: Callable[[Job, Row], None] | None = None
    ) -> list[Answer]:
        """Starts waiting jobs in free rows and decodes, until rows are free for the next ones or all are finished.

        Args:
          most_iterations: returns after so many forwards at the latest.
          observe: called with every job that has a row and how far it came, before the answers are returned.

        Returns:
          the answers that were finished.
        """
        answers = self._drop_waiting()
        with self.statistics.timed("prefill_seconds"):
            while self._waiting and None in self._jobs:
                self._admit()
            cancelled = np.array([job is not None and job.name in self._reasons for job in self._jobs])
            if cancelled.any():
                with self._on_mesh():
                    self._state = release(self._state, cancelled)
            if self._measured:
                jax.block_until_ready(self._state.open)  # to tell prefill from decoding
        occupied = sum(job is not None for job in self._jobs)
        # Free rows are useful only while jobs wait for them; at the end, answers should not wait for the slowest row.
        batch = self._admission if self._waiting else max(self._admission, occupied // 4)
        with self.statistics.timed("decode_seconds"):
            limits = np.int32(max(1, occupied - batch + 1)), np.int32(most_iterations)
            with self._on_mesh():
                self._state, work = decode_loop(
                    self._program, self._params, self._prefix, self._request, self._state, *limits
                )
            fetched, work = jax.device_get((self._state.replace(cache=None), work))
        iterations = int(work.iterations)
        self.statistics.iterations += iterations
        self.statistics.row_forwards += iterations * len(self._jobs)
        self.statistics.positions += int(work.positions)
        self.statistics.needed_positions += int(work.needed_positions)
        return answers + self._collect(fetched, observe)

    def _unfinished(self) -> Iterator[Job]:
        return itertools.chain((job for job in self._jobs if job is not None), self._waiting)

    def _drop_waiting(self) -> list[Answer]:
        dropped = [job for job in self._waiting if job.name in self._reasons]
        for job in dropped:
            self._waiting.remove(job)
        return [self._answer(job, _blank_row(self._capacity)) for job in dropped]

    def _collect(self, state: Any, observe: Callable[[Job, Row], None] | None) -> list[Answer]:
        answers = []
        for index, job in enumerate(self._jobs):
            if job is None:
                continue
            row = Row(
                state.tokens[index],
                state.probabilities[index],
                state.committed[index],
                state.commit_forwards[index],
                int(state.forwards[index]),
                state.accepted[index],
                int(state.events[index]),
            )
            asked_before = job.name in self._reasons
            if observe is not None:
                observe(job, row)
            if not state.open[index].any():
                self._jobs[index] = None
                if not asked_before:
                    self._reasons.pop(job.name, None)  # it was finished before anyone could end it
                answers.append(self._answer(job, row))
        return answers

    def _answer(self, job: Job, row: Row) -> Answer:
        reason = self._reasons.pop(job.name, None)
        answer = read_row(row, job.layout, job.config, self._model.eos_token_ids, job.index, job.sample, reason)
        self.statistics.prompts += 1
        self.statistics.tokens += len(answer.tokens)
        self.statistics.forwards += answer.forwards
        return dataclasses.replace(answer, position_ids=[self._offset + p for p in answer.position_ids])

    def _admit(self) -> None:
        """Starts the next jobs, as many as one prefill takes."""
        places = self._free_places()[: len(self._waiting)]
        jobs = [self._waiting.popleft() for _ in places]
        length = bucket(max(job.layout.prompt_length for job in jobs), MIN_PROMPT_BUCKET)
        tokens = np.full((self._admission, length), self._model.pad_token_id, np.int32)
        position_ids = np.zeros_like(tokens)
        lengths = np.zeros(self._admission, np.int32)
        rows = np.full(self._admission, len(self._jobs), np.int32)
        for (index, row), job in zip(places, jobs, strict=True):
            count = job.layout.prompt_length
            tokens[index, :count] = job.layout.tokens
            position_ids[index, :count] = self._offset + job.layout.token_position_ids
            lengths[index], rows[index] = count, row
            self._jobs[row] = job
        asked = self._lay_out(jobs, self._admission)
        if self._shares > 1:
            taken = [index for index, _ in places]
            order = np.argsort([*taken, *sorted(set(range(self._admission)) - set(taken))])
            asked = jax.tree.map(lambda values: np.asarray(values)[order], asked)
        with self._on_mesh():
            self._request, self._state = admit(
                self._program.module,
                self._params,
                self._prefix,
                *(tokens, position_ids, lengths, rows, asked),
                self._request,
                self._state,
                split=self._program.split,
            )

    def _free_places(self) -> list[tuple[int, int]]:
        """For each prompt that one prefill can take, its index among them and the free row for it, on one device."""
        prompts, rows = self._admission // self._shares, len(self._jobs) // self._shares
        places: list[tuple[int, int]] = []
        for share in range(self._shares):
            free = [row for row in range(share * rows, (share + 1) * rows) if self._jobs[row] is None]
            places += enumerate(free[:prompts], share * prompts)
        return places

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def _lay_out(self, jobs: Sequence[Job], rows: int) -> Request:
        return make_request(jobs, rows, self._capacity, self._suppressed, self._offset, self._model)

    def _prefill_prefix(self, prefix: Sequence[int]) -> KVCache:
        width = bucket(len(prefix), MIN_PROMPT_BUCKET)
        tokens = np.full((self._shares, width), self._model.pad_token_id, np.int32)
        tokens[:, : len(prefix)] = prefix
        length, split = np.array([len(prefix)], np.int32), self._program.split
        with self._on_mesh():
            return prefill_prefix(self._program.module, self._params, tokens, length, split=split)


def _blank_row(capacity: int) -> Row:
    zeros = np.zeros(capacity, np.int32)
    return Row(zeros, zeros.astype(np.float32), zeros.astype(bool), zeros, 0, zeros, 0)


def unstarted(job: Job) -> Answer:
    """The answer to a job that has nothing to decode."""
    return read_row(_blank_row(0), job.layout, job.config, (), *job.name, None)


@jax.jit
@jax.vmap
def random_keys(seed: jax.Array, index: jax.Array, sample: jax.Array) -> jax.Array:
    """(n, 2) uint32 key data, a function of seed, prompt index and sample, (n,) uint32 each."""
    return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), index), sample))


def make_request(
    jobs: Sequence[Job], rows: int, capacity: int, suppressed: int, offset: int, model: ModelConfig
) -> Request:
    """Lays out settings as arrays: rows beyond the jobs are finished from the start.

    Args:
      jobs: at most `rows`.
      capacity: response offsets. suppressed: suppressed IDs per row.
      offset: tokens of a shared prefix, by which all position IDs are moved.
      model: for its special tokens.
    """
    configs = [job.config for job in jobs]
    idle = rows - len(jobs)

    def per_row(values: Sequence[Any], dtype: Any, idle_value: Any = 0) -> Any:
        return np.array([*values, *[idle_value] * idle], dtype)

    def per_offset(values: Sequence[np.ndarray]) -> Any:
        table: Any = np.zeros((rows, capacity), np.int32)
        for row, labels in zip(table, values, strict=False):
            row[: len(labels)] = labels
        return table

    lengths = per_row([job.layout.response_length for job in jobs], np.int32)
    offsets: Any = np.arange(capacity, dtype=np.int32)
    slot_starts = per_offset([job.layout.slot_starts for job in jobs])
    keys: Any = (
        row_keys(jobs, rows) if any(config.temperature > 0 for config in configs) else np.zeros((rows, 2), np.uint32)
    )
    return Request(
        position_ids=offset + per_offset([job.layout.position_ids for job in jobs]),
        slot_starts=slot_starts,
        blocks=per_offset([job.layout.blocks for job in jobs]),
        holes=per_offset([job.layout.holes for job in jobs]),
        is_response=offsets < lengths[:, None],
        self_correcting=per_row([c.algorithm == "self_correcting" for c in configs], np.bool_, True),
        redraft=per_row([c.redraft for c in configs], np.bool_),
        slot_thresholds=per_row([c.slot_threshold for c in configs], np.float32),
        token_thresholds=per_row([c.token_threshold for c in configs], np.float32),
        carry_thresholds=per_row([c.carry_threshold for c in configs], np.float32),
        temperatures=per_row([c.temperature for c in configs], np.float32),
        top_ks=per_row([limit_of(c, model) for c in configs], np.int32),
        top_ps=per_row([c.top_p for c in configs], np.float32, 1),
        keys=keys,
        eos_ids=per_row([model.eos_token_ids] * len(jobs), np.int32, model.eos_token_ids),
        suppressed_ids=suppressed_table(configs, rows, suppressed, model),
    )


def row_keys(jobs: Sequence[Job], rows: int) -> Any:
    """(rows, 2) uint32 key data of each row, those of jobs first."""
    names = np.zeros((3, rows), np.uint32)
    for row, job in enumerate(jobs):
        names[:, row] = job.seed, *job.name
    return random_keys(*names)


def limit_of(config: DecodeConfig, model: ModelConfig) -> int:
    """The `top_k` of a row; the vocabulary's size where all of it counts."""
    return config.top_k if 0 < config.top_k < model.vocab_size else model.vocab_size


def suppressed_table(configs: Sequence[DecodeConfig], rows: int, count: int, model: ModelConfig) -> Any:
    """(rows, count) int32, the suppressed IDs of each row; the vocabulary's size stands for none."""
    table: Any = np.full((rows, count), model.vocab_size, np.int32)
    for row, config in zip(table, configs, strict=False):
        ids = suppressed_ids(config, model)
        row[: len(ids)] = ids
    return table


def group_by_length(lengths: Sequence[int], rows: int) -> list[list[int]]:
    """Divides jobs among streams, so that short responses need not have the buffers of long ones.

    Jobs of one response bucket form a group when there are enough of them; too few join the next longer ones.

    Args:
      lengths: response length of each job. rows: of the streams.

    Returns:
      indices into `lengths`, group by group; in a group the longest first, so that none is late at the end.
    """
    groups: list[list[int]] = []
    pending: list[int] = []
    by_bucket = itertools.groupby(
        sorted(range(len(lengths)), key=lambda i: lengths[i]), lambda i: _capacity(lengths[i])
    )
    for _, members in by_bucket:
        pending += members
        if len(pending) >= max(LEAST_GROUP, 4 * rows):
            groups.append(pending[::-1])
            pending = []
    return [*groups, pending[::-1]] if pending else groups


def decode_jobs(
    module: Transformer, params: Any, jobs: Sequence[Job], batch_size: int = 32, **options: Any
) -> Iterator[Answer]:
    """Decodes a list of jobs and yields the answers as they finish.

    Args:
      batch_size: the most rows to decode at once.
      options: `prefix`, `rules`, `statistics` and `mesh` of a `Stream`.
    """
    yield from (unstarted(job) for job in jobs if not job.layout.response_length)
    pending = [job for job in jobs if job.layout.response_length]
    rows = min(batch_size, bucket(len(pending), row_shares(options.get("mesh"))))
    for group in group_by_length([job.layout.response_length for job in pending], rows):
        members = [pending[index] for index in group]
        stream = Stream(
            module,
            params,
            rows=rows,
            **dataclasses.asdict(Bounds.of((job.layout, job.config) for job in members)),
            **options,
        )
        for job in members:
            stream.submit(job)
        while stream.busy:
            yield from stream.advance()


def decode_prompts(
    module: Transformer,
    params: Any,
    prompts: Sequence[Sequence[int] | Template],
    configs: Sequence[DecodeConfig],
    seed: int = 0,
    batch_size: int = 32,
    **options: Any,
) -> Generation:
    """Decodes token prompts or templates of any number and lengths, each with its own settings.

    Args:
      module, params: the model.
      prompts: lists of token IDs, or of segments: token IDs and `Hole`s.
      configs: one per prompt.
      seed: with a prompt's index in the list, all that its random draws depend on.
      batch_size: the most rows to decode at once.
      options: `prefix`, `rules`, `statistics` and `mesh` of a `Stream`.

    Raises:
      ConfigError: naming the first prompt that cannot be decoded.
    """
    jobs = []
    for index, (prompt, config) in enumerate(zip(prompts, configs, strict=True)):
        try:
            layout = prepare_layout(prompt, config, module.config, len(options.get("prefix", ())))
        except ConfigError as error:
            raise ConfigError(f"Prompt {index}: {error}") from error
        jobs.append(Job(index, 0, layout, config, seed))
    return Generation.of(list(decode_jobs(module, params, jobs, batch_size, **options)))
