"""Streams and batches: refusals, order of results, independence of rows, cancelling, buckets, shared prefixes."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import ConfigError, DecodeConfig, ModelConfig
from refusion_jax.decoding import Hole, Job, Rules, Statistics, Stream, batching, decode_jobs, decode_prompts
from refusion_jax.decoding.batching import bucket, group_by_length, make_request, query_shapes, unstarted
from refusion_jax.decoding.layout import lay_out
from refusion_jax.decoding.refusion import Program, admit, decode_loop, empty_state
from refusion_jax.modeling import Transformer

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=48,
    initializer_range=0.5,
    eos_token_ids=(1, 7),
)
MODULE = Transformer(CONFIG)
ROWS, CAPACITY, PROMPT_LENGTH, SUPPRESSED = 8, 16, 32, 4  # the shapes that most tests share
GREEDY = [
    DecodeConfig(algorithm="paper", gen_length=16, slot_size=4, slot_threshold=0.2, token_threshold=0.05),
    DecodeConfig(gen_length=12, slot_size=3, serial_num_blocks=2, slot_threshold=0.2, token_threshold=0.1),
    DecodeConfig(algorithm="paper", gen_length=9, slot_size=1, serial_num_blocks=3, slot_threshold=0.5),
    DecodeConfig(gen_length=16, slot_size=8, slot_threshold=0.1, token_threshold=0.5, redraft=True),
    DecodeConfig(gen_length=6, slot_size=2, slot_threshold=0.0, suppress_special=True),
]
SAMPLED = [
    DecodeConfig(algorithm="paper", gen_length=16, slot_size=4, token_threshold=0.3, temperature=0.8),
    *GREEDY[:2],
    DecodeConfig(gen_length=16, slot_size=4, slot_threshold=0.1, token_threshold=0.9, temperature=1.0, top_k=9),
    DecodeConfig(gen_length=12, slot_size=4, slot_threshold=0.1, temperature=0.5, top_p=0.8, suppress_special=True),
]
AT_ONCE = DecodeConfig(gen_length=1, slot_size=1)
# Without an EOS to propose, and every slot and token by itself.
TO_THE_END = DecodeConfig(gen_length=16, slot_size=1, slot_threshold=1.0, token_threshold=1.0, suppress_ids=(1, 7))
PROMPTS = [[5], [9, 8, 3, 20, 31], list(range(8, 28)), [11, 11, 4], [30, 29]]
TEMPLATE = [[5, 9], Hole(5), [12, 13], Hole(6), [8]]
FIELDS = ("tokens", "committed", "position_ids", "order", "forwards", "finish_reason", "tpf", "holes")


@pytest.fixture(scope="module", autouse=True)
def two_prompts_per_prefill(quick_compilation):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "ROWS_PER_ADMISSION", 4)
        yield


@pytest.fixture(scope="module")
def params(quick_compilation):
    variables = jax.jit(MODULE.init)(jax.random.key(3), jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32))
    return nn.meta.unbox(variables)["params"]


def row(result, index):
    return [getattr(result, field)[index] for field in FIELDS]


def make_job(index, prompt, config, seed=0, sample=0):
    return Job(index, sample, lay_out(prompt, config), config, seed)


def open_stream(params, jobs=(), rows=ROWS, **options):
    shape = {"prompt_length": PROMPT_LENGTH, "response_length": CAPACITY, "suppressed": SUPPRESSED}
    stream = Stream(MODULE, params, rows=rows, **(shape | options))
    for job in jobs:
        stream.submit(job)
    return stream


def finish(stream, *arguments):
    answers = []
    while stream.busy:
        answers += stream.advance(*arguments)
    return answers


def run(params, jobs, rows=ROWS, **options):
    """The answers of a stream by the names of their jobs."""
    answers = finish(open_stream(params, jobs, rows, **options))
    named = {(answer.index, answer.sample): answer for answer in answers}
    assert len(named) == len(answers) == len(jobs)
    return named


def assert_same(answer, other):
    """Equal, up to the rounding of probabilities, which differs between forwards of different shapes."""
    for field in dataclasses.fields(answer):
        got, expected = getattr(answer, field.name), getattr(other, field.name)
        if field.name == "probabilities":
            np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=field.name)
        else:
            assert got == expected, field.name


def test_bucket():
    assert [bucket(size, 32) for size in (0, 1, 32, 33, 64, 65, 1000)] == [32, 32, 32, 64, 64, 128, 1024]
    assert [bucket(size, 1) for size in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, 16]


def test_query_shapes():
    assert query_shapes(1, 64) == ((16, 16), (32, 32), (64, 64))
    assert query_shapes(8, 16)[0] == (64, 16) and query_shapes(8, 16)[-1] == (128, 16)
    for rows, capacity in ((1, 16), (5, 100), (64, 64), (1000, 512)):
        shapes = query_shapes(rows, capacity)
        assert list(shapes) == sorted(set(shapes))
        assert all(tokens <= rows * width and width in (16, 32, 64, 128, 256, 512) for tokens, width in shapes)
        # The last holds any queries: full rows of the longest response.
        assert shapes[-1] == (rows * bucket(capacity, 16), bucket(capacity, 16))


# ---- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "Prompt 1: The prompt is empty; give at least one token."),
        ([3, 32], "Prompt 1: Prompt token 32 lies outside the vocabulary of 32 tokens."),
        ([-1], "Prompt 1: Prompt token -1 lies outside the vocabulary of 32 tokens."),
        (
            [4] * 37,
            "Prompt 1: The prompt has 37 tokens, with 12 to fill that makes 49, beyond the maximum of 48; "
            "shorten the prompt or lower gen_length.",
        ),
        ([[3], Hole(2), Hole(3)], "Prompt 1: Two holes stand next to each other, of 2 and 3 tokens; "
                                  "make them one, or put text between them."),
    ],
    ids=["empty", "beyond", "negative", "long", "adjacent_holes"],
)  # fmt: skip
def test_unusable_prompts_are_refused(params, prompt, message):
    settings = DecodeConfig(gen_length=10, slot_size=4)
    with pytest.raises(ConfigError) as error:
        decode_prompts(MODULE, params, [[3], prompt, []], [settings] * 3)
    assert str(error.value) == message


def test_the_longest_possible_prompt_is_decoded(params, count_compilations):
    """Up to the model's last position, past a bucket that would hold more. A bucket of its own is one loop to compile,
    so the count of compilations can tell."""
    settings = DecodeConfig(gen_length=10, slot_size=4, suppress_special=True)
    with count_compilations() as compiled:
        result = decode_prompts(MODULE, params, [[4] * 36], [settings])
    assert 1 <= len(result.committed[0]) <= 12
    assert result.position_ids[0][0] >= 36 and result.position_ids[0][-1] < 48
    assert compiled.count("jit(decode_loop)") == 1


def test_no_prompts(params):
    result = decode_prompts(MODULE, params, [], [])
    assert all(getattr(result, field) == [] for field in FIELDS)


def test_prompts_and_settings_must_pair_up(params):
    with pytest.raises(ValueError):
        decode_prompts(MODULE, params, PROMPTS, GREEDY[:2])


def test_fixed_text_alone_is_answered_without_a_forward(params):
    statistics = Statistics()
    job = make_job(3, [[5, 6]], AT_ONCE)
    assert list(decode_jobs(MODULE, params, [job], statistics=statistics)) == [unstarted(job)]
    answer = unstarted(job)
    assert (answer.index, answer.tokens, answer.holes, answer.committed, answer.forwards) == (3, [], [], [], 0)
    assert statistics.iterations == 0


def test_results_come_in_input_order(params):
    whole = decode_prompts(MODULE, params, PROMPTS, SAMPLED, batch_size=2)
    named = run(params, [make_job(i, *each) for i, each in enumerate(zip(PROMPTS, SAMPLED, strict=True))])
    assert len({tuple(tokens) for tokens in whole.tokens}) == len(PROMPTS)
    for index in range(5):
        assert row(whole, index) == [getattr(named[index, 0], field) for field in FIELDS]


def test_greedy_results_do_not_depend_on_the_place_in_the_list(params):
    """The last one samples, so that all lists share a program."""
    prompts, configs = [*PROMPTS, [6]], [*GREEDY, SAMPLED[0]]
    whole = decode_prompts(MODULE, params, prompts, configs, batch_size=2)
    for permutation in ([2, 4, 0, 1, 3, 5], [1, 0, 3, 4, 2, 5]):
        chosen = [prompts[i] for i in permutation], [configs[i] for i in permutation]
        result = decode_prompts(MODULE, params, *chosen, batch_size=2)
        assert [row(result, place) for place in range(6)] == [row(whole, index) for index in permutation]


def test_short_and_many_responses_have_a_stream_of_their_own(monkeypatch):
    monkeypatch.setattr(batching, "LEAST_GROUP", 6)
    few, many = [3] * 5 + [20] * 2, [3] * 12 + [40] + [20] * 13 + [5]
    assert group_by_length([], 2) == []
    assert [sorted(group) for group in group_by_length(few, 1)] == [list(range(7))]
    groups = group_by_length(many, 3)
    assert [{many[index] for index in group} for group in groups] == [{3, 5}, {20}, {40}]
    assert sorted(index for group in groups for index in group) == list(range(len(many)))
    # Too few for so many rows join longer ones; in a group the longest begin.
    joined = group_by_length(many, 4)
    assert [[many[index] for index in group] for group in joined] == [[*[20] * 13, 5, *[3] * 12], [40]]
    monkeypatch.setattr(batching, "LEAST_GROUP", 14)
    assert [{many[index] for index in group} for group in group_by_length(many, 1)] == [{20, 5, 3}, {40}]


@pytest.mark.slow
def test_groups_give_the_same_answers(params, monkeypatch):
    prompts, configs = [*PROMPTS, [6]] * 4, [*GREEDY, SAMPLED[0]] * 4
    whole = decode_prompts(MODULE, params, prompts, configs, batch_size=2)
    monkeypatch.setattr(batching, "LEAST_GROUP", 1)
    monkeypatch.setattr(batching, "MIN_RESPONSE_BUCKET", 8)
    lengths = [lay_out(*each).response_length for each in zip(prompts, configs, strict=True)]
    assert len(group_by_length(lengths, 1)) == 2
    grouped = decode_prompts(MODULE, params, prompts, configs, batch_size=1)
    assert [row(grouped, index) for index in range(24)] == [row(whole, index) for index in range(24)]


def test_longest_responses_start_first_and_answers_come_as_they_finish(params):
    jobs = [make_job(0, [5], AT_ONCE), make_job(1, [6], AT_ONCE), make_job(2, [5], TO_THE_END)]
    jobs += [make_job(index, [5 + index], AT_ONCE) for index in range(3, 6)]
    statistics = Statistics()
    answers = list(decode_jobs(MODULE, params, jobs, batch_size=2, statistics=statistics))
    assert answers[-1].index == 2 and {answer.index for answer in answers} == set(range(6))
    assert statistics.iterations == answers[-1].forwards


# ---- rows ----------------------------------------------------------------------------------------------------------


def pool():
    """Jobs of all kinds and lengths; some finish at once, some run to the end."""
    rng = np.random.default_rng(0)
    configs = [*GREEDY, *SAMPLED, AT_ONCE, dataclasses.replace(AT_ONCE, temperature=1.0), TO_THE_END]
    configs.append(dataclasses.replace(TO_THE_END, algorithm="paper", slot_size=4, temperature=0.7))
    configs.append(dataclasses.replace(TO_THE_END, slot_size=4, token_threshold=0.3, carry_threshold=0.2))
    jobs = []
    for index in range(2 * len(configs)):
        prompt = rng.integers(8, 32, size=rng.integers(1, 20)).tolist()
        jobs.append(make_job(index, TEMPLATE if index % 7 == 0 else prompt, configs[index % len(configs)], index % 3))
    return [*jobs, *(dataclasses.replace(jobs[8], sample=sample) for sample in (1, 2))]


@pytest.fixture(scope="module")
def alone(params, two_prompts_per_prefill):
    """Every job's answer when it is decoded by itself."""
    return run(params, pool(), rows=1)


def test_the_pool_has_what_it_is_for(alone):
    assert {answer.finish_reason for answer in alone.values()} == {"eos", "length"}
    forwards = [answer.forwards for answer in alone.values()]
    assert min(forwards) <= 2 and max(forwards) >= 12
    assert len({tuple(alone[8, sample].committed) for sample in range(3)}) > 1


@pytest.mark.parametrize("rows", [2, ROWS])
def test_answers_are_the_same_in_every_batch_composition(params, alone, rows):
    """Whatever the companions, the order and the row; rows are taken over by later jobs all the time."""
    jobs = pool()
    for seed in range(4):
        rng = np.random.default_rng(seed)
        chosen = [jobs[i] for i in rng.permutation(len(jobs))[: rng.integers(3, len(jobs), endpoint=True)]]
        for name, answer in run(params, chosen, rows).items():
            assert_same(answer, alone[name])


@pytest.mark.slow
def test_smaller_programs_give_the_same_answers(params, alone):
    """Those without sampling, without the published algorithm, or without suppressed tokens."""
    greedy = [job for job in pool() if job.config.temperature == 0]
    ours = [job for job in pool() if job.config.algorithm == "self_correcting"]
    both = [job for job in greedy if job.config.algorithm == "self_correcting"]
    free = [job for job in ours if not job.config.suppress_ids and not job.config.suppress_special]
    assert min(map(len, (greedy, both, free))) >= 5
    for jobs, options in (
        (greedy, {"sampling": False}),
        (both, {"sampling": False, "infilling": False}),
        (free, {"infilling": False, "suppressed": 0}),
    ):
        for name, answer in run(params, jobs, rows=2, **options).items():
            assert_same(answer, alone[name])


def test_seed_index_and_sample_decide_what_is_drawn(params):
    settings = DecodeConfig(gen_length=16, slot_size=4, temperature=1.5)

    def committed(*names):
        jobs = [Job(index, sample, lay_out([5, 6], settings), settings, seed) for seed, index, sample in names]
        answers = run(params, jobs)
        return [answers[job.name].committed for job in jobs]

    names = [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 5, 3)]
    first = committed(*names)
    assert len({tuple(tokens) for tokens in first}) == len(names)
    assert committed(*names[::-1]) == first[::-1]
    other = committed((1, 0, 0), (2, 1, 0))
    assert other[0] != first[0] and other[1] != first[1]


def test_tokens_end_at_the_first_eos(params):
    prompts = [[token, 9] for token in range(8, 32)]
    settings = DecodeConfig(
        algorithm="paper", gen_length=16, slot_size=2, slot_threshold=0.5, token_threshold=0.5, temperature=1.0
    )
    jobs = [make_job(index, prompt, settings) for index, prompt in enumerate(prompts)]
    answers = run(params, jobs).values()
    for answer in answers:
        committed = answer.committed
        ends = [index for index, token in enumerate(committed) if token in CONFIG.eos_token_ids]
        assert answer.finish_reason == ("eos" if ends else "length")
        assert answer.tokens == (committed[: ends[0] + 1] if ends else committed)
        assert answer.holes == [answer.tokens]
        assert len(answer.order) == len(answer.position_ids) == len(answer.probabilities) == len(committed)
        assert ends or len(committed) == 16
    assert {answer.finish_reason for answer in answers} == {"eos", "length"}
    assert any(sum(token in CONFIG.eos_token_ids for token in answer.committed) > 1 for answer in answers), (
        "no EOS was overtaken by an earlier one"
    )


def test_rows_are_taken_over(params, alone):
    """Two rows; pairs of a long and a short job would take as many long decodes one after another."""
    long, short = (next(job for job in pool() if job.config == config) for config in (TO_THE_END, AT_ONCE))
    jobs = []
    for index in range(4):
        jobs += [dataclasses.replace(long, index=2 * index), dataclasses.replace(short, index=2 * index + 1)]
    statistics = Statistics()
    run(params, jobs, rows=2, statistics=statistics)
    most, least = alone[long.name].forwards, alone[short.name].forwards
    assert 2 * most <= statistics.iterations <= 2 * most + 4 * least < 4 * most


def test_answers_do_not_wait_for_the_slowest_row(params):
    jobs = [make_job(0, [5], TO_THE_END), *(make_job(index, [5 + index], AT_ONCE) for index in range(1, ROWS))]
    stream = open_stream(params, jobs)
    first = stream.advance()
    assert first and all(answer.index != 0 for answer in first) and stream.busy
    assert finish(stream)[-1].index == 0


def test_statistics(params):
    jobs, statistics = pool(), Statistics(prompts=100)
    answers = run(params, jobs, statistics=statistics).values()
    assert statistics.prompts == 100 + len(jobs)
    assert statistics.tokens == sum(len(answer.tokens) for answer in answers)
    assert statistics.forwards == sum(answer.forwards for answer in answers)
    assert statistics.row_forwards == ROWS * statistics.iterations
    assert statistics.row_forwards >= statistics.forwards
    assert statistics.iterations >= max(answer.forwards for answer in answers)
    # Every needed position is of a row's forward, every computed one of a batch's.
    assert statistics.forwards <= statistics.needed_positions <= statistics.positions
    assert statistics.positions <= statistics.iterations * ROWS * CAPACITY
    assert min(statistics.prefill_seconds, statistics.decode_seconds) > 0
    assert statistics.prefill_seconds + statistics.decode_seconds <= statistics.seconds


def test_positions_are_those_of_the_compiled_shapes(params):
    """A job of one token needs one position per forward, and the smallest shape is computed for it."""
    statistics = Statistics()
    stream = open_stream(params, [make_job(0, [5], AT_ONCE)], statistics=statistics)
    forwards = finish(stream)[0].forwards
    assert statistics.iterations == statistics.forwards == forwards
    assert statistics.needed_positions == forwards
    assert statistics.positions == 64 * forwards


def test_room_is_for_the_free_rows_and_the_next_admission(params):
    stream = open_stream(params)
    assert not stream.busy
    for index in range(ROWS + 2):
        assert stream.room == ROWS + 2 - index
        stream.submit(make_job(index, [5], TO_THE_END))
    assert stream.room == 0 and stream.busy
    stream.submit(make_job(99, [5], TO_THE_END))
    stream.advance(1)
    assert stream.room == 0


# ---- one step at a time, and ending early --------------------------------------------------------------------------


def test_a_stream_can_be_stopped_after_every_forward(params, alone):
    jobs, statistics = pool()[:12], Statistics()
    stream = open_stream(params, jobs, statistics=statistics)
    seen, answers = {}, []

    def observe(job, row):
        told = seen.setdefault(job.name, [])
        assert row.forwards == len(told) + 1
        if told:
            kept = told[-1].committed
            assert (row.committed | ~kept).all()
            np.testing.assert_array_equal(row.tokens[kept], told[-1].tokens[kept])
        told.append(row)

    for count in range(1, 1000):
        answers += stream.advance(1, observe)
        assert statistics.iterations == count
        if not stream.busy:
            break
    assert {(answer.index, answer.sample) for answer in answers} == {job.name for job in jobs} == set(seen)
    for answer in answers:
        name = answer.index, answer.sample
        assert_same(answer, alone[name])
        last = seen[name][-1]
        assert last.tokens[last.committed].tolist() == answer.committed
        assert len(seen[name]) == answer.forwards


def test_cancelling_a_waiting_job(params):
    jobs = [make_job(index, [5 + index], TO_THE_END) for index in range(4)]
    stream = open_stream(params, jobs, rows=2)
    stream.cancel((3, 0))
    first = stream.advance(1)
    assert [(answer.index, answer.finish_reason, answer.forwards) for answer in first] == [(3, "cancelled", 0)]
    assert first[0].tokens == first[0].committed == []
    rest = finish(stream)
    assert sorted(answer.index for answer in rest) == [0, 1, 2]
    assert {answer.finish_reason for answer in rest} == {"length"}


def test_cancelling_running_jobs(params):
    jobs = [make_job(index, [5 + index], TO_THE_END, sample=index % 2) for index in range(6)]
    whole = run(params, jobs)
    stream = open_stream(params, jobs)
    assert stream.advance(5) == []
    stream.cancel((1, 1))
    stream.cancel((4, 0), "stop")
    ended = stream.advance(1)
    assert [(answer.index, answer.finish_reason) for answer in ended] == [(1, "cancelled"), (4, "stop")]
    for answer in ended:
        complete = whole[answer.index, answer.sample]
        expected = dict(zip(complete.position_ids, complete.committed, strict=True))
        assert answer.forwards == 5
        early = [at for at, order in zip(complete.position_ids, complete.order, strict=True) if order < 5]
        assert answer.position_ids == early and early
        assert answer.committed == [expected[position] for position in early]
    others = finish(stream)
    assert sorted(answer.index for answer in others) == [0, 2, 3, 5]
    for answer in others:
        assert_same(answer, whole[answer.index, answer.sample])


def test_a_cancelled_jobs_row_is_taken_over(params, alone):
    long = next(job for job in pool() if job.config == TO_THE_END)
    stream = open_stream(params, [dataclasses.replace(long, index=index) for index in range(3)], rows=2)
    stream.advance(3)
    stream.cancel((0, 0))
    answers = {answer.index: answer for answer in finish(stream)}
    assert answers[0].finish_reason == "cancelled"
    for index in (1, 2):
        assert_same(answers[index], dataclasses.replace(alone[long.name], index=index))


def test_a_job_may_be_cancelled_by_who_observes_it(params, alone):
    jobs = [job for job in pool() if alone[job.name].forwards > 4][:4]
    stream = open_stream(params, jobs)

    def observe(job, row):
        if job.name == jobs[1].name and row.forwards == 3:
            stream.cancel(job.name)

    answers = {(answer.index, answer.sample): answer for answer in finish(stream, 1, observe)}
    assert (answers[jobs[1].name].finish_reason, answers[jobs[1].name].forwards) == ("cancelled", 3)
    for job in (jobs[0], jobs[2], jobs[3]):
        assert_same(answers[job.name], alone[job.name])


# ---- what a stream was made for ------------------------------------------------------------------------------------


def test_jobs_that_exceed_the_stream_are_refused(params):
    def message(job, **options):
        stream = open_stream(params, rows=2, **options)
        with pytest.raises(ConfigError) as caught:
            stream.submit(job)
        assert not stream.busy
        return str(caught.value)

    words = "The stream was made for {}, too little for {}; make it larger."
    assert message(make_job(0, [5] * 33, AT_ONCE)) == words.format("prompt_length 32", 33)
    longer = DecodeConfig(gen_length=17, slot_size=1)
    assert message(make_job(0, [5], longer)) == words.format("response_length 16", 17)
    many = DecodeConfig(gen_length=1, slot_size=1, suppress_ids=(9, 10, 11), suppress_special=True)
    assert message(make_job(0, [5], many)) == words.format("suppressed 4", 5)
    assert message(make_job(0, [5], TO_THE_END), suppressed=0) == words.format("suppressed 0", 2)
    assert "made for greedy jobs" in message(make_job(0, [5], SAMPLED[3]), sampling=False)
    assert 'made without algorithm "paper"' in message(make_job(0, [5], GREEDY[0]), infilling=False)


def test_filler_rows_are_finished_from_the_start(params):
    statistics = Statistics()
    jobs = [make_job(i, *each) for i, each in enumerate(zip(PROMPTS[:3], SAMPLED[:3], strict=True))]
    forwards = [answer.forwards for answer in run(params, jobs, statistics=statistics).values()]
    assert statistics.iterations == max(forwards)
    assert statistics.forwards == sum(forwards)


# ---- compilations and transfers ------------------------------------------------------------------------------------


def test_another_stream_in_the_same_buckets_compiles_nothing(params, count_compilations):
    """Whatever the number of prompts, their lengths and settings."""
    run(params, pool())
    with count_compilations() as compiled:
        run(params, [make_job(0, [3, 4], SAMPLED[3])], prompt_length=17, response_length=16)
        jobs = [make_job(index, [3] * (1 + index), [*GREEDY, *SAMPLED][index % 10]) for index in range(13)]
        run(params, jobs, prompt_length=2 * 13, response_length=9, suppressed=1)
        stream = open_stream(params, jobs)
        stream.advance(2)
        stream.cancel((0, 0))
        finish(stream)
    # Only cancelling is new.
    assert [name for name in compiled if name != "jit(release)"] == []


def test_other_settings_and_as_many_prompts_compile_nothing(params, count_compilations):
    decode_prompts(MODULE, params, PROMPTS, SAMPLED, seed=1, batch_size=2)
    with count_compilations() as compiled:
        decode_prompts(MODULE, params, [[3, 4]] * 9, [*SAMPLED, *GREEDY[:4]], seed=2, batch_size=2)
    assert compiled == []


def test_the_loop_transfers_nothing(params):
    """Nothing comes from the host while it runs, and no callback goes there."""
    program = Program(MODULE, query_shapes(ROWS, CAPACITY))
    params = jax.device_put(params)
    state = empty_state(program, ROWS, CAPACITY, PROMPT_LENGTH + CAPACITY)
    request = jax.device_put(make_request([], ROWS, CAPACITY, SUPPRESSED, 0, CONFIG))
    for first in (0, 2, 4):
        prompts = list(zip(PROMPTS, SAMPLED, strict=True))[first : first + 2]
        jobs = [make_job(first + index, *each) for index, each in enumerate(prompts)]
        tokens, position_ids = np.zeros((2, 2, PROMPT_LENGTH), np.int32)
        for line, job in enumerate(jobs):
            tokens[line, : job.layout.prompt_length] = job.layout.tokens
            position_ids[line, : job.layout.prompt_length] = job.layout.token_position_ids
        lengths = np.array([job.layout.prompt_length for job in jobs] + [0] * (2 - len(jobs)), np.int32)
        rows = np.array([first, first + 1 if len(jobs) == 2 else ROWS], np.int32)
        asked = make_request(jobs, 2, CAPACITY, SUPPRESSED, 0, CONFIG)
        arrays = jax.device_put((tokens, position_ids, lengths, rows, asked))
        request, state = admit(MODULE, params, None, *arrays, request, state)
    limits = jax.device_put((np.int32(1), np.int32(1000)))
    assert state.open.any(axis=1).tolist() == [True] * 5 + [False] * 3
    assert "callback" not in str(decode_loop.trace(program, params, None, request, state, *limits).jaxpr)
    with jax.transfer_guard("disallow"):
        state, work = decode_loop(program, params, None, request, state, *limits)
    assert not jax.device_get(state.open).any()
    assert 0 < int(work.iterations) < 1000


# ---- a shared prefix -----------------------------------------------------------------------------------------------

PREFIX = [21, 9, 30, 14, 8, 25]


def test_a_shared_prefix_is_as_if_it_began_every_prompt(params):
    """For plain prompts and templates, greedy and sampled: noise goes by position."""
    jobs = [job for job in pool() if job.layout.prompt_length + len(PREFIX) <= PROMPT_LENGTH]
    assert len(jobs) > 20 and any(job.layout.holes.any() for job in jobs)

    def behind(layout):
        fixed = np.concatenate([np.arange(len(PREFIX)), layout.token_position_ids + len(PREFIX)]).astype(np.int32)
        tokens = np.concatenate([PREFIX, layout.tokens]).astype(np.int32)
        moved = layout.position_ids + np.int32(len(PREFIX))
        return dataclasses.replace(layout, tokens=tokens, token_position_ids=fixed, position_ids=moved)

    joined = [dataclasses.replace(job, layout=behind(job.layout)) for job in jobs]
    expected, got = run(params, joined), run(params, jobs, prefix=PREFIX)
    for name, answer in got.items():
        assert_same(answer, expected[name])
    assert min(min(answer.position_ids) for answer in got.values()) == len(PREFIX) + 1
    without = run(params, jobs)
    assert any(without[name].committed != answer.committed for name, answer in got.items())


def test_a_prefix_by_prompts_and_by_templates(params):
    prompts = [*PROMPTS, TEMPLATE]
    joined = [*(PREFIX + prompt for prompt in PROMPTS), [PREFIX + TEMPLATE[0], *TEMPLATE[1:]]]
    configs = [*SAMPLED, SAMPLED[3]]
    got = decode_prompts(MODULE, params, prompts, configs, prefix=PREFIX)
    expected = decode_prompts(MODULE, params, joined, configs)
    for index in range(len(prompts)):
        assert row(got, index) == row(expected, index)


def test_a_prefix_that_leaves_too_little_room_is_refused(params):
    settings = DecodeConfig(gen_length=12, slot_size=4)
    with pytest.raises(ConfigError) as caught:
        decode_prompts(MODULE, params, [[3], [4] * 30], [settings] * 2, prefix=[9] * 7)
    assert str(caught.value) == (
        "Prompt 1: The prompt has 30 tokens, with 12 to fill that makes 42, beyond the maximum of 41; shorten the "
        "prompt or lower gen_length. The shared prefix takes 7 of the model's 48 positions."
    )


@pytest.mark.parametrize("bound", [False, True], ids=["params anywhere", "params bound to a device"])
def test_a_stream_compiles_each_function_once(params, count_compilations, bound):
    """However often rows are taken over: results that go in again have the types and places of what went in before."""
    params = jax.device_put(params, jax.devices()[0]) if bound else params
    rules = Rules(accept=lambda v: v.probability > v.threshold)  # a new function, so nothing is compiled yet
    with count_compilations() as compiled:
        decode_prompts(MODULE, params, PROMPTS * 2, [*GREEDY, *SAMPLED], batch_size=2, rules=rules)
    assert compiled.count("jit(decode_loop)") == 1
    assert compiled.count("jit(admit)") <= 1
