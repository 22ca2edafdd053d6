"""The model as the harness knows it, with a harness that is real and tasks that are made up."""

import dataclasses
import math

import datasets
import numpy as np
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

import refusion_jax as rf
from refusion_jax.config import ConfigError
from refusion_jax.evaluation.harness import RefusionLM
from refusion_jax.evaluation.journal import Journal
from refusion_jax.evaluation.runner import Runner
from refusion_jax.processes import ALONE, Process

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPTS = ["Hi", "What is 2+2?", "Count to three, please.", "Once upon a time", "!"]


def generation(prompts=PROMPTS, task="made_up", **asked):
    asked = {"until": [], **asked}
    return [Instance("generate_until", {}, (prompt, asked), i, (task, i, 1)) for i, prompt in enumerate(prompts)]


def scoring(pairs, task="made_up"):
    return [Instance("loglikelihood", {}, pair, i, (task, i, 1)) for i, pair in enumerate(pairs)]


def documents():
    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n), "choices": ["x", str(2 * n)]} for n in range(6)]
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})


GENERATIVE = {
    "task": "made_up",
    "custom_dataset": lambda **_: documents(),
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["Q"], "do_sample": False, "max_gen_toks": 10},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
CHOICES = GENERATIVE | {
    "task": "made_up_choices",
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": 1,
    "generation_kwargs": None,
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def evaluate(lm, *tasks, **options):
    manager = TaskManager(include_defaults=False)  # whose thousands of files take a while to read
    return simple_evaluate(
        model=lm, tasks=[dict(task) for task in tasks], task_manager=manager, bootstrap_iters=0, **options
    )


@pytest.fixture(scope="module")
def plain(chat_model):
    return RefusionLM(chat_model, 2)


def test_the_harness_knows_it_by_name():
    assert get_model("refusion_jax") is RefusionLM


def test_answers_are_those_of_generate(chat_model, plain):
    config = dataclasses.replace(chat_model.decode, stop=("a",))
    expected = rf.generate(chat_model, PROMPTS, config, batch_size=2).text
    assert plain.generate_until(generation(until=["a"])) == expected
    speed = plain.get_model_info()["refusion_jax"]["speed"]["made_up"]
    assert speed["responses"] == 5
    assert speed["tokens_per_forward"] > 1


def test_whole_evaluations_say_how_they_decoded_and_what_it_cost(plain):
    results = evaluate(plain, GENERATIVE, CHOICES)
    assert 0 <= results["results"]["made_up"]["exact_match,none"] <= 1
    assert 0 <= results["results"]["made_up_choices"]["acc,none"] <= 1
    found = results["config"]["refusion_jax"]
    assert found["settings"]["made_up"]["gen_length"] == 12  # the task's 10, in whole slots
    assert found["settings"]["made_up"]["stop"] == ["Q"]
    assert (found["method"]["name"], found["estimate"]) == ("refusion", "left_to_right")
    assert found["speed"]["made_up_choices"]["scored"] == 12
    assert set(found["speed"]["made_up"]) >= {"tokens_per_second", "latency_seconds", "mean_response_length"}


@pytest.mark.slow
def test_a_tasks_settings_are_the_papers_unless_they_are_overridden(chat_model):
    lm = RefusionLM(chat_model, gen_length=16, slot_size=8, serial_num_blocks=2, token_threshold=1)
    lm.generate_until(generation(PROMPTS[:1], "gsm8k"))
    settings = lm.get_model_info()["refusion_jax"]["settings"]["gsm8k"]
    assert (settings["configs_eval"], settings["slot_threshold"], settings["token_threshold"]) == ("gsm8k", 0.9, 1.0)
    plain = RefusionLM(chat_model, eval_configs=False)
    plain.generate_until(generation(PROMPTS[:1], "gsm8k"))
    settings = plain.get_model_info()["refusion_jax"]["settings"]["gsm8k"]
    assert (settings["configs_eval"], settings["slot_threshold"]) == (None, 0.2)


def test_likelihoods_are_those_of_log_likelihood(chat_model, plain):
    pairs = [("Hi", " there"), ("2+2=", "4"), ("2+2=", "five"), ("a b ", "c")]
    found = plain.loglikelihood(scoring(pairs))
    tokens = [[chat_model.tokenizer.encode(text) for text in pair] for pair in pairs[:3]]
    tokens.append([chat_model.tokenizer.encode("a b"), chat_model.tokenizer.encode(" c")])
    expected = rf.log_likelihood(chat_model, [t[0] for t in tokens], [t[1] for t in tokens])
    np.testing.assert_allclose([value for value, _ in found], expected.values, atol=1e-4)
    assert [greedy for _, greedy in found] == expected.is_greedy


@pytest.mark.slow
def test_a_bound_by_name(chat_model):
    lm = RefusionLM(chat_model, estimate="bound", num_draws=4, slot_size=2)
    ((value, _),) = lm.loglikelihood(scoring([("Hi", " there")]))
    tokens = [chat_model.tokenizer.encode(text) for text in ("Hi", " there")]
    options = {"estimate": "bound", "num_draws": 4, "slot_size": 2}
    assert value == pytest.approx(rf.log_likelihood(chat_model, tokens[:1], tokens[1:], **options).values[0], abs=1e-4)


def test_an_empty_context_is_the_end_of_a_text_before(chat_model, plain):
    eos = [chat_model.tokenizer.eos_token_id]
    ((value, _),) = plain.loglikelihood(scoring([("", "word")]))
    expected = rf.log_likelihood(chat_model, [eos], [chat_model.tokenizer.encode("word")]).values[0]
    assert value == pytest.approx(expected, abs=1e-4)


def test_a_model_that_predicts_the_same_everywhere(chat_model):
    """Of zero weights every estimate is exact: each token has the same probability."""
    zeros = dataclasses.replace(chat_model, params={name: _zeros(leaf) for name, leaf in chat_model.params.items()})
    each = -math.log(chat_model.config.vocab_size)
    lm = RefusionLM(zeros, num_draws=2)
    assert lm.loglikelihood(scoring([("a", "bcd")]))[0][0] == pytest.approx(3 * each, rel=1e-5)
    long = "x" * 600  # windows of 256 positions
    requests = [
        Instance("loglikelihood_rolling", {}, (text,), i, ("made_up", i, 1)) for i, text in enumerate((long, "y"))
    ]
    found = lm.loglikelihood_rolling(requests)
    lengths = [len(chat_model.tokenizer.encode(text)) for text in (long, "y")]
    assert found == pytest.approx([length * each for length in lengths], rel=1e-5)


def _zeros(leaf):
    return {name: _zeros(each) for name, each in leaf.items()} if isinstance(leaf, dict) else leaf * 0


@pytest.mark.slow
def test_batches_do_not_change_scores(chat_model):
    found = []
    for batch_size in (1, 3, 32):
        lm = RefusionLM(chat_model, batch_size, num_draws=3, estimate="bound")
        results = evaluate(lm, GENERATIVE, CHOICES, log_samples=True)
        texts = [sample["resps"] for sample in results["samples"]["made_up"]]
        found.append((texts, results["results"]["made_up_choices"]["acc,none"]))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_long_prompts_lose_their_beginning_and_are_counted(chat_model, plain):
    long = "abc" * 200
    room = chat_model.config.context_length - chat_model.decode.gen_length
    kept = chat_model.tokenizer.encode(long)[-room:]
    assert plain.generate_until(generation([long, "Hi"], "lengthy")) == rf.generate(chat_model, [kept, "Hi"]).text
    speed = plain.get_model_info()["refusion_jax"]["speed"]["lengthy"]
    assert (speed["prompts_cut"], speed["prompt_tokens_cut"]) == (1, len(chat_model.tokenizer.encode(long)) - room)
    plain.loglikelihood(scoring([(long, "x")], "lengthy_too"))
    speed = plain.get_model_info()["refusion_jax"]["speed"]["lengthy_too"]
    assert (speed["prompts_cut"], speed["prompt_tokens_cut"]) == (1, 600 + 1 - chat_model.config.context_length)


def test_a_response_that_leaves_no_room_is_refused(chat_model):
    lm = RefusionLM(chat_model, gen_length=256)
    with pytest.raises(ConfigError, match=r"Task made_up: gen_length 256, in whole slots 256 tokens, leaves none of"):
        lm.generate_until(generation())


def test_the_harnesss_cache_keeps_answers(chat_model, tmp_path, monkeypatch):
    lm = RefusionLM(chat_model, 2)
    first = evaluate(lm, GENERATIVE, CHOICES, use_cache=str(tmp_path / "cache"), log_samples=True)
    monkeypatch.setattr(Runner, "generate", lambda *_: pytest.fail("computed again"))
    monkeypatch.setattr(Runner, "score", lambda *_: pytest.fail("computed again"))
    again = evaluate(lm, GENERATIVE, CHOICES, use_cache=str(tmp_path / "cache"), log_samples=True)
    assert again["results"] == first["results"]


@pytest.mark.slow
def test_repeats_of_a_prompt_are_sampled_anew(chat_model):
    lm = RefusionLM(chat_model, 4)
    texts = lm.generate_until(generation(["Hi"] * 3, do_sample=True, temperature=2.0))
    assert len(set(texts)) == 3
    assert texts == lm.generate_until(generation(["Hi"] * 3, do_sample=True, temperature=2.0))


# ---- interruptions and processes -----------------------------------------------------------------------------------


class Stopped(Exception):
    pass


class Signals:
    """Interrupts after so many answers."""

    def __init__(self, after):
        self.left, self.waiting = after, False

    def check(self):
        self.left -= 1
        if not self.left:
            raise Stopped


def test_an_interrupted_evaluation_goes_on(chat_model, tmp_path):
    expected = RefusionLM(chat_model, 2).generate_until(generation(temperature=1.0, do_sample=True))
    with Journal(tmp_path, {}, ALONE) as journal, pytest.raises(Stopped):
        lm = RefusionLM(chat_model, 2, journal=journal, signals=Signals(2))
        lm.generate_until(generation(temperature=1.0, do_sample=True))
    with Journal(tmp_path, {}, ALONE) as journal:
        assert len(journal.records) == 2
        lm = RefusionLM(chat_model, 3, journal=journal)
        assert lm.generate_until(generation(temperature=1.0, do_sample=True)) == expected
        assert len(journal.records) == 5
    assert lm.get_model_info()["refusion_jax"]["speed"]["made_up"]["responses"] == 5


@pytest.mark.slow
def test_an_interrupted_scoring_goes_on(chat_model, tmp_path, monkeypatch):
    monkeypatch.setattr("refusion_jax.evaluation.runner._SCORED_AT_ONCE", 2)
    pairs = [(prompt, " answer") for prompt in PROMPTS]
    expected = RefusionLM(chat_model).loglikelihood(scoring(pairs))
    with Journal(tmp_path, {}, ALONE) as journal, pytest.raises(Stopped):
        RefusionLM(chat_model, "auto", journal=journal, signals=Signals(2)).loglikelihood(scoring(pairs))
    with Journal(tmp_path, {}, ALONE) as journal:
        found = RefusionLM(chat_model, "auto", journal=journal).loglikelihood(scoring(pairs))
    np.testing.assert_allclose([v for v, _ in found], [v for v, _ in expected], atol=1e-4)


def test_a_process_computes_its_share(chat_model, monkeypatch):
    shares = {}

    def gather(process, records):
        shares[process.id] = dict(records)
        return {place: record for share in shares.values() for place, record in share.items()}

    monkeypatch.setattr("refusion_jax.evaluation.runner._gather", gather)
    expected = RefusionLM(chat_model).generate_until(generation())
    shares.clear()
    with pytest.raises(KeyError):  # the other's share is not there yet
        RefusionLM(chat_model, process=Process(0, 2)).generate_until(generation())
    assert sorted(shares[0]) == [0, 2, 4]
    assert RefusionLM(chat_model, process=Process(1, 2)).generate_until(generation()) == expected


# ---- conversations -------------------------------------------------------------------------------------------------


def test_conversations_are_written_by_the_template(chat_model, plain):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert plain.apply_chat_template(messages) == text
    open_ended = [*messages, {"role": "assistant", "content": "I say: "}]
    assert plain.apply_chat_template(open_ended, add_generation_prompt=False) == text + "I say: "


class Template:
    """A tokenizer whose template strips messages and takes notice of thinking."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def render(self, messages, *, add_generation_prompt, enable_thinking):
        body = "".join(f"[{message['content'].strip()}]" for message in messages)
        return body + ("" if not add_generation_prompt else "think:" if enable_thinking else "say:")


def test_thinking_is_told_to_the_template_and_cut_off_answers(chat_model, monkeypatch):
    model = dataclasses.replace(chat_model, tokenizer=Template(chat_model.tokenizer))
    monkeypatch.setattr(
        Runner, "generate", lambda *_: [{"text": "2 and 2 ...</think>\n\n4"} | dict.fromkeys(_FIELDS, 1)]
    )
    user = [{"role": "user", "content": " 2+2 "}]
    thinking, silent = RefusionLM(model), RefusionLM(model, enable_thinking=False)
    assert thinking.generate_until(generation(PROMPTS[:1])) == ["2 and 2 ...</think>\n\n4"]  # no conversation
    assert (thinking.apply_chat_template(user), silent.apply_chat_template(user)) == ("[2+2]think:", "[2+2]say:")
    assert thinking.generate_until(generation(PROMPTS[:1])) == ["4"]
    assert silent.generate_until(generation(PROMPTS[:1])) == ["2 and 2 ...</think>\n\n4"]
    assert thinking.tokenizer_name != silent.tokenizer_name
    assert thinking.apply_chat_template(user, add_generation_prompt=False) == "[2+2"


_FIELDS = ("tokens", "forwards", "latency", "prompt_tokens", "cut_tokens", "unknown_tokens", "finish_reason", "process",
           "started", "elapsed", "compiling")  # fmt: skip


def test_evaluations_of_conversations(plain, chat_model):
    results = evaluate(plain, GENERATIVE, apply_chat_template=True, limit=1, log_samples=True)
    ((prompt, _),) = [sample["arguments"][0] for sample in results["samples"]["made_up"]]
    assert prompt == "<|im_start|>user\n0+0=<|im_end|>\n<|im_start|>assistant\n"


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"checkpoint": ""}, "checkpoint is missing; give a run directory"),
        ({"slot_sizes": 8}, r"Unknown model argument 'slot_sizes'. Did you mean 'slot_size'\?"),
        ({"slot_score": "best"}, "slot_score is 'best', not one of first_token"),
        ({"estimate": "exact"}, "estimate is 'exact'; it must be"),
        ({"method": "llada"}, "method is 'llada', but the checkpoint was trained with the objective 'unknown'"),
        ({"method": "refusion", "steps": 4}, r"method.steps is 4, but method.name is 'refusion'"),
    ],
)
def test_wrong_arguments_are_refused(chat_model, arguments, message):
    with pytest.raises(ConfigError, match=message):
        RefusionLM(**{"checkpoint": chat_model, **arguments})


def test_a_batch_size_among_the_models_arguments_wins(chat_model):
    lm = RefusionLM.create_from_arg_obj({"checkpoint": chat_model, "batch_size": 3}, {"batch_size": 1, "device": None})
    assert lm._runner.batch_size == 3
    assert (
        RefusionLM.create_from_arg_obj({"checkpoint": chat_model}, {"batch_size": "auto"})._runner.batch_size == "auto"
    )


def test_a_model_without_tokenizer_is_refused(chat_model):
    with pytest.raises(ConfigError, match="The model has no tokenizer, and the harness's prompts are texts"):
        RefusionLM(dataclasses.replace(chat_model, tokenizer=None))


@pytest.mark.slow
def test_other_objectives_decode_and_score_by_their_own_methods(chat_model):
    model = dataclasses.replace(chat_model, objective="autoregressive")
    lm = RefusionLM(model, gen_length=8)
    texts = lm.generate_until(generation(PROMPTS[:2]))
    expected = rf.generate(model, PROMPTS[:2], rf.DecodeConfig(gen_length=8), method=rf.Method("autoregressive"))
    assert texts == expected.text
    ((value, _),) = lm.loglikelihood(scoring([("Hi", "you")]))
    tokens = [chat_model.tokenizer.encode(text) for text in ("Hi", "you")]
    assert value == pytest.approx(rf.log_likelihood(model, tokens[:1], tokens[1:]).values[0], abs=1e-4)


def test_a_checkpoint_of_unknown_objective_is_scored_as_it_is_decoded(chat_model):
    lm = RefusionLM(chat_model, method="autoregressive", allow_objective="unknown")
    model = dataclasses.replace(chat_model, objective="autoregressive")
    tokens = [chat_model.tokenizer.encode(text) for text in ("Hi", "you")]
    ((value, _),) = lm.loglikelihood(scoring([("Hi", "you")]))
    assert value == pytest.approx(rf.log_likelihood(model, tokens[:1], tokens[1:]).values[0], abs=1e-4)


def test_settings_of_another_method_are_arguments_too(chat_model):
    lm = RefusionLM(chat_model, method="llada", allow_objective="unknown", threshold=1, gen_length=8)
    lm.generate_until(generation(PROMPTS[:1]))
    assert lm.get_model_info()["refusion_jax"]["method"]["threshold"] == 1.0
