"""Response tokens per second of ReFusion's decoding, next to plain left-to-right decoding of the same weights.

    python benchmarks/decode.py
    python benchmarks/decode.py --models=reference --yardstick --yardstick_python=PYTHON_WITH_TORCH

Two models: the recorded checkpoint of the tests, and a random one of Qwen3's shape with 100 M parameters, whose drafts
all stand, so that its responses show what a forward costs and nothing about quality. On the random one it also prints
what an iteration of the decode loop costs beyond a bare forward, and on the recorded one how busy the rows of a batch
are kept by 256 prompts whose responses differ in length.

With --yardstick, our turns alternate with those of `benchmarks/decode_yardstick.py`: the forwards that the authors'
decoding of 160 prompts was recorded to take, in eager PyTorch. A machine's speed drifts, so only turns of one round are
compared. Our turns are whole calls of `generate`, prefill included.
"""

import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script finds its own directory only

import refusion_jax as rf
from benchmarks import common
from benchmarks.common import of, spread
from refusion_jax import ConfigError, DecodeConfig, ModelConfig, command_line
from refusion_jax.config import to_dict
from refusion_jax.decoding import Statistics, autoregressive, batching
from refusion_jax.decoding.kv_cache import empty_cache
from refusion_jax.files import write_json
from refusion_jax.host_memory import keep_freed_memory
from refusion_jax.methods import UNKNOWN
from refusion_jax.modeling import Transformer

FLAGS = flags.FlagValues()
flags.DEFINE_list("models", ",".join(common.MODELS), "Models to decode with.", flag_values=FLAGS)
flags.DEFINE_list("batch_sizes", "1,4,16,64", "Rows decoded at once, each in turn.", flag_values=FLAGS)
flags.DEFINE_integer("rounds", 3, "Rounds to measure.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_boolean("yardstick", False, "Compare with PyTorch.", flag_values=FLAGS)
flags.DEFINE_string("yardstick_python", sys.executable, "Python with torch and transformers.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "Default: benchmarks/results/decode_BACKEND.json.", flag_values=FLAGS)

REFERENCE = common.HERE.parent / "tests" / "data" / "reference"
SETTINGS = ("gen_length", "slot_size", "serial_num_blocks", "slot_threshold", "token_threshold")
EOS = 1  # of the recorded checkpoint
RECORDED_PROMPTS = 64
PROMPT_LENGTH = 24  # of random prompts
# Settings of the comparison with the authors, chosen on the same prompts: more right answers than their decoding has.
OURS = DecodeConfig(gen_length=64, slot_size=16, serial_num_blocks=4, carry_threshold=0.5)
# Where the published decoding carries its next draft; its answers do not depend on it.
PAPER_CARRY_THRESHOLD = 0.3
# Random weights are sure of nothing: one slot at a time, and a threshold that any token passes.
ALL_STAND = DecodeConfig(gen_length=32, slot_size=8, slot_threshold=1.0, token_threshold=0.0)
# One slot that is repaired until it stands: every forward has the same query.
REPAIRED = DecodeConfig(gen_length=32, slot_size=32, slot_threshold=1.0, token_threshold=1.0)
REPAIRED_ROWS = 4
MIXED_PROMPTS, MIXED_ROWS, MIXED_LENGTHS = 256, 16, (8, 256)
YARDSTICK_ROWS = (1, 16)


# ---- what to decode ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and what is asked of it: `prompts(rows)` gives the prompts to decode on so many rows."""

    name: str
    model: rf.Model
    config: DecodeConfig
    prompts: Callable[[int], list[list[int]]]


def read_cases() -> list[dict[str, Any]]:
    """The recorded decodes of the authors' code, with the shape of every forward."""
    return json.loads((REFERENCE / "cases" / "decode.json").read_text())


def reference_workload(cases: Sequence[dict[str, Any]]) -> Workload:
    """The recorded checkpoint, on some of the recorded prompts."""
    prompts = [case["prompt"] for case in cases[:RECORDED_PROMPTS]]
    return Workload("reference", rf.load(REFERENCE / "checkpoint"), OURS, lambda rows: prompts)


def random_model(config: ModelConfig) -> rf.Model:
    """A model with random weights."""
    module, one = Transformer(config), jnp.zeros((1, 1), jnp.int32)
    params = nn.meta.unbox(jax.jit(module.init)(jax.random.key(0), one, one)["params"])
    return rf.Model(config, module, params, None, DecodeConfig())


def random_prompts(config: ModelConfig, count: int) -> list[list[int]]:
    """Prompts of random tokens."""
    return np.random.default_rng(0).integers(3, config.vocab_size, (count, PROMPT_LENGTH)).tolist()


def random_workload() -> Workload:
    """A random model, on as many random prompts as there are rows."""
    model = random_model(common.SHAPE_100M)
    return Workload("100m", model, ALL_STAND, lambda rows: random_prompts(model.config, rows))


# ---- speed ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one way of decoding did: seconds from the prompts to the last answer and, of these, those of the prefills
    and of the decode loops; response tokens; forwards of the whole batch, and those that a row took part in, summed.
    """

    seconds: float
    prefill_seconds: float
    decode_seconds: float
    tokens: int
    iterations: int
    forwards: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def decode_refusion(work: Workload, prompts: Sequence[list[int]], rows: int) -> Turn:
    """Decodes with ReFusion's decoder."""
    return _turn(work, prompts, work.config, rows, rf.Method())


def decode_plainly(work: Workload, prompts: Sequence[list[int]], rows: int) -> Turn:
    """Decodes left to right, the same weights and lengths."""
    config = dataclasses.replace(work.config, gen_length=work.config.rounded_length, algorithm="self_correcting")
    return _turn(work, prompts, config, rows, rf.Method("autoregressive"))


def _turn(work: Workload, prompts: Sequence[list[int]], config: DecodeConfig, rows: int, method: rf.Method) -> Turn:
    s, objective = Statistics(), work.model.objective or UNKNOWN
    rf.generate(work.model, prompts, config, batch_size=rows, statistics=s, method=method, allow_objective=objective)
    return Turn(s.seconds, s.prefill_seconds, s.decode_seconds, s.tokens, s.iterations, s.forwards)


WAYS = {"ReFusion": decode_refusion, "left to right": decode_plainly}


def measure_speed(work: Workload, rows: int, rounds: int) -> list[dict[str, Any]]:
    """One record for each way of decoding; their turns alternate."""
    prompts = work.prompts(rows)
    for way in WAYS.values():
        way(work, prompts, rows)  # compiles
    turns = [[way(work, prompts, rows) for way in WAYS.values()] for _ in range(rounds)]
    about = {"model": work.name, "batch_size": rows, "prompts": len(prompts)}
    return [about | {"decoding": name} | summarise([turn[i] for turn in turns]) for i, name in enumerate(WAYS)]


def summarise(turns: Sequence[Turn]) -> dict[str, Any]:
    """The figures of all turns; what was decoded is the same in each."""
    last = turns[-1]
    return {
        "tokens": last.tokens,
        "iterations": last.iterations,
        "tokens_per_forward": last.tokens / last.forwards,
        "prefill_seconds": statistics.median(turn.prefill_seconds for turn in turns),
        "decode_seconds": statistics.median(turn.decode_seconds for turn in turns),
        "tokens_per_second": spread([turn.tokens_per_second for turn in turns]),
        "ms_per_forward": spread([1e3 * turn.decode_seconds / turn.iterations for turn in turns]),
    }


SPEED_HEADER = (
    "model", "rows", "decoding", "tokens", "tokens/s", "prefill, s", "decode, s", "forwards", "ms/forward",
    "tokens per row and forward",
)  # fmt: skip


def speed_row(record: dict[str, Any]) -> list[str]:
    """The table row of a record of `measure_speed`."""
    return [
        record["model"],
        str(record["batch_size"]),
        record["decoding"],
        f"{record['tokens']:,}",
        of(record["tokens_per_second"], ",.0f"),
        f"{record['prefill_seconds']:.3f}",
        f"{record['decode_seconds']:.3f}",
        str(record["iterations"]),
        of(record["ms_per_forward"], ".2f"),
        f"{record['tokens_per_forward']:.1f}",
    ]


def report_speed(works: Sequence[Workload], batch_sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Measures every model at every batch size and prints a table of them."""
    records = []
    for work in works:
        for rows in batch_sizes:
            print(f"{work.name}, {rows} rows ...", file=sys.stderr, flush=True)
            records += measure_speed(work, rows, rounds)
    print(common.table(SPEED_HEADER, map(speed_row, records)), flush=True)
    return records


# ---- an iteration beside a bare forward ----------------------------------------------------------------------------


def make_bare_forward(model: rf.Model, rows: int, width: int, buffer_length: int) -> Callable[[], Any]:
    """Returns a compiled forward: `rows` queries of `width` tokens on a buffer that holds a prompt each."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, model.config.vocab_size, (rows, width)), jnp.int32)
    position_ids = jnp.broadcast_to(PROMPT_LENGTH + jnp.arange(width, dtype=jnp.int32), tokens.shape)
    cache = empty_cache(model.config, rows, buffer_length)
    cache = cache.replace(lengths=jnp.full_like(cache.lengths, PROMPT_LENGTH))

    @jax.jit
    def forward(params: Any, tokens: jax.Array, position_ids: jax.Array, cache: Any) -> Any:
        hidden, kv = autoregressive.encode_causal(model.module, params, tokens, position_ids, cache)
        return model.module.apply({"params": params}, hidden, method="unembed"), kv

    return lambda: jax.block_until_ready(forward(model.params, tokens, position_ids, cache))


def measure_iteration(model: rf.Model, rounds: int) -> dict[str, Any]:
    """Seconds of an iteration of the decode loop and of a bare forward of the same query and buffer, alternating."""
    rows, width = REPAIRED_ROWS, REPAIRED.rounded_length
    prompts = random_prompts(model.config, rows)
    buffer_length = batching.bucket(PROMPT_LENGTH, batching.MIN_PROMPT_BUCKET)
    buffer_length += batching.bucket(width, batching.MIN_RESPONSE_BUCKET)
    forward = make_bare_forward(model, rows, width, buffer_length)
    work = Workload("", model, REPAIRED, lambda rows: prompts)
    forward()
    decode_refusion(work, prompts, rows)
    iterations, forwards, ratios = [], [], []
    for _ in range(rounds):
        turn = decode_refusion(work, prompts, rows)
        iterations.append(turn.decode_seconds / turn.iterations)
        began = time.perf_counter()
        for _ in range(turn.iterations):
            forward()
        forwards.append((time.perf_counter() - began) / turn.iterations)
        ratios.append(iterations[-1] / forwards[-1])
    return {
        "rows": rows,
        "query_width": width,
        "buffer_length": buffer_length,
        "iterations": turn.iterations,
        "ms_per_iteration": spread([1e3 * seconds for seconds in iterations]),
        "ms_per_bare_forward": spread([1e3 * seconds for seconds in forwards]),
        "ratio": spread(ratios),
    }


def report_iteration(model: rf.Model, rounds: int) -> dict[str, Any]:
    """Measures and prints what an iteration costs beyond a bare forward."""
    record = measure_iteration(model, rounds)
    print(
        f"\nAn iteration of {record['rows']} rows and {record['query_width']} query tokens takes "
        f"{of(record['ms_per_iteration'], '.1f')} ms, a bare forward on the same buffer of {record['buffer_length']} "
        f"{of(record['ms_per_bare_forward'], '.1f')} ms; ratio {of(record['ratio'], '.2f')}.",
        flush=True,
    )
    return record


# ---- how busy the rows are -----------------------------------------------------------------------------------------


def mixed_lengths() -> list[int]:
    """Response lengths, even on a logarithmic scale, in random order."""
    lengths = np.geomspace(*MIXED_LENGTHS, MIXED_PROMPTS).round().astype(int)
    return np.random.default_rng(0).permutation(lengths).tolist()


def measure_occupancy(model: rf.Model, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """How much of the work of a batch is for rows that still want it, with responses of `mixed_lengths`."""
    # Without an EOS, every response is as long as asked for.
    config = dataclasses.replace(model.config, eos_token_ids=(model.config.vocab_size - 1,))
    endless = dataclasses.replace(model, config=config, module=Transformer(config))
    configs = [
        dataclasses.replace(OURS, gen_length=length, slot_size=8, serial_num_blocks=1) for length in mixed_lengths()
    ]
    prompts = [prompts[index % len(prompts)] for index in range(MIXED_PROMPTS)]
    s = Statistics()
    rf.generate(endless, prompts, configs, batch_size=MIXED_ROWS, statistics=s)
    return {
        "prompts": MIXED_PROMPTS,
        "rows": MIXED_ROWS,
        "response_lengths": list(MIXED_LENGTHS),
        "iterations": s.iterations,
        "unfinished_row_share": s.forwards / s.row_forwards,
        "needed_position_share": s.needed_positions / s.positions,
    }


def report_occupancy(work: Workload) -> dict[str, Any]:
    """Measures and prints how busy the rows are."""
    record = measure_occupancy(work.model, work.prompts(MIXED_ROWS))
    shortest, longest = record["response_lengths"]
    print(
        f"\n{record['prompts']} responses of {shortest} to {longest} tokens on {record['rows']} rows, "
        f"{record['iterations']} iterations: {record['unfinished_row_share']:.1%} of the row-forwards belong to "
        f"unfinished rows, {record['needed_position_share']:.1%} of the query positions were needed.",
        flush=True,
    )
    return record


# ---- the yardstick -------------------------------------------------------------------------------------------------


def through_eos(tokens: Sequence[int]) -> list[int]:
    """The tokens up to and including the first EOS."""
    return list(tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens)


def response_of(case: dict[str, Any]) -> list[int]:
    """What the authors' code responded, up to and including the first EOS."""
    return through_eos(case["expected"][len(case["prompt"]) :])


def vocabulary(cases: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Token IDs of the characters, one token each.

    Questions tell those of letters and digits. Punctuation is told by the answers that are right as far as one can see
    without it.

    Raises:
      ValueError: when a character has two token IDs.
    """
    ids: dict[str, int] = {}

    def learn(text: str, tokens: Sequence[int]) -> None:
        for character, token in zip(text, tokens, strict=True):
            if ids.setdefault(character, token) != token:
                raise ValueError(f"{character!r} is both token {ids[character]} and {token}.")

    for case in cases:
        learn(case["question"], case["prompt"])
    of_questions = dict(ids)
    for case in cases:
        response = response_of(case)[:-1]
        agrees = all(of_questions.get(c, t) == t for c, t in zip(case["gold"], response, strict=False))
        if agrees and len(response) == len(case["gold"]):
            learn(case["gold"], response)
    return ids


def golds(cases: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The right responses as token IDs, with EOS."""
    ids = vocabulary(cases)
    return [[*(ids[character] for character in case["gold"]), EOS] for case in cases]


def exact_match(responses: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """The share of responses that are as expected."""
    return sum(list(r) == list(e) for r, e in zip(responses, expected, strict=True)) / len(expected)


class Contest:
    """Our decodings of the recorded prompts, beside the forwards that the authors' took."""

    def __init__(self, cases: Sequence[dict[str, Any]], model: rf.Model, python: str):
        self._model, self._prompts = model, [case["prompt"] for case in cases]
        self._golds = golds(cases)
        shared = {"algorithm": "paper", "carry_threshold": PAPER_CARRY_THRESHOLD}
        recorded = [DecodeConfig(**shared, **{name: case[name] for name in SETTINGS}) for case in cases]
        self._configs = {"paper": recorded, "self_correcting": [OURS] * len(cases)}
        self._theirs = [response_of(case) for case in cases]
        calls = [call for case in cases for call in case["calls"]]
        request = {"checkpoint": str(REFERENCE / "checkpoint"), "calls": calls}
        self._yardstick = common.Yardstick(python, "decode_yardstick.py", request)
        self.versions = self._yardstick.versions

    def close(self) -> None:
        """Ends the yardstick's process."""
        self._yardstick.close()

    def _ours(self, algorithm: str, rows: int) -> tuple[float, float]:
        """Tokens per second of a whole call, and exact match."""
        began = time.perf_counter()
        result = rf.generate(self._model, self._prompts, self._configs[algorithm], batch_size=rows)
        seconds = time.perf_counter() - began
        return sum(map(len, result.tokens)) / seconds, exact_match(result.tokens, self._golds)

    def measure(self, rounds: int) -> dict[str, Any]:
        """Turns alternate; a ratio is ours to theirs of one round."""
        entries = [(algorithm, rows) for algorithm in self._configs for rows in YARDSTICK_ROWS]
        matches = {entry: self._ours(*entry)[1] for entry in entries}  # compiles
        ours: dict[tuple[str, int], list[float]] = {entry: [] for entry in entries}
        theirs = []
        for _ in range(rounds):
            tokens = sum(map(len, self._theirs))
            theirs.append(tokens / self._yardstick.ask("all")["seconds"])
            for entry in entries:
                ours[entry].append(self._ours(*entry)[0])
        return {
            "tokens_per_second": spread(theirs),
            "exact_match": exact_match(self._theirs, self._golds),
            "settings": {
                "paper": f"as recorded, carry_threshold {PAPER_CARRY_THRESHOLD}",
                "self_correcting": to_dict(OURS),
            },
            "ours": [
                {
                    "algorithm": algorithm,
                    "batch_size": rows,
                    "exact_match": matches[algorithm, rows],
                    "tokens_per_second": spread(ours[algorithm, rows]),
                    "ratio": spread([a / b for a, b in zip(ours[algorithm, rows], theirs, strict=True)]),
                }
                for algorithm, rows in entries
            ],
        }


def yardstick_table(record: dict[str, Any]) -> str:
    """The table of `Contest.measure`."""
    header = ["decoding", "rows", "exact match", "tokens/s", "ratio to the yardstick"]
    theirs = of(record["tokens_per_second"], ",.0f")
    rows = [["yardstick", "1", f"{record['exact_match']:.3f}", theirs, "1"]]
    for ours in record["ours"]:
        figures = [f"{ours['exact_match']:.3f}", of(ours["tokens_per_second"], ",.0f"), of(ours["ratio"], ".2f")]
        rows.append([ours["algorithm"], str(ours["batch_size"]), *figures])
    return common.table(header, rows)


# ---- command line --------------------------------------------------------------------------------------------------


def parse_batch_sizes(sizes: Sequence[str]) -> list[int]:
    """Reads batch sizes.

    Raises:
      ConfigError: for anything but a positive whole number.
    """
    bad = [size for size in sizes if not (size.isdecimal() and int(size))]
    if bad or not sizes:
        raise ConfigError(f"--batch_sizes has {(bad or [''])[0]!r}; give whole numbers of at least 1, such as 1,16.")
    return [int(size) for size in sizes]


def main(args: flags.FlagValues) -> None:
    """Measures, prints and writes the result."""
    keep_freed_memory()
    models, batch_sizes = common.parse_models(args.models), parse_batch_sizes(args.batch_sizes)
    output = common.result_path(args.output, "decode")
    result: dict[str, Any] = {"commit": common.commit(), "machine": common.machine(), "versions": common.versions()}
    common.warn_if_busy(result["machine"])
    cases = read_cases()
    make = {"reference": lambda: reference_workload(cases), "100m": random_workload}
    works = {name: make[name]() for name in models}
    result["settings"] = {"rounds": args.rounds, "reference": to_dict(OURS), "100m": to_dict(ALL_STAND)}
    result["speed"] = report_speed(list(works.values()), batch_sizes, args.rounds)
    if "100m" in works:
        result["iteration"] = report_iteration(works["100m"].model, args.rounds)
    if "reference" in works:
        result["occupancy"] = report_occupancy(works["reference"])
    if args.yardstick:
        model = rf.load(REFERENCE / "checkpoint")
        with contextlib.closing(Contest(cases, model, args.yardstick_python)) as contest:
            result["versions"] |= contest.versions
            result["yardstick"] = contest.measure(args.rounds)
        print(f"\n{yardstick_table(result['yardstick'])}", flush=True)
    result["peak_rss_mib"] = common.peak_rss_mib()
    write_json(output, result)
    print(f"\nWritten to {output}.")


if __name__ == "__main__":
    command_line.run(main, FLAGS)
