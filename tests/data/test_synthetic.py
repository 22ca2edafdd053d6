import collections
import json
import pathlib
import re
import time

import pytest

from refusion_jax.config import SYNTHETIC_TASKS
from refusion_jax.data import synthetic
from refusion_jax.data.records import DataError, Example

CASES = sorted((pathlib.Path(__file__).parent / "reference" / "cases").glob("decode*.json"))
PATTERNS = {
    "R": re.compile(r"R:[a-j]{4,23}\?"),
    "S": re.compile(r"S:[1-9](\+[1-9]){2,7}\?"),
    "Q": re.compile(r"Q:([1-9]|[1-5][0-9]),([6-9]|1[0-5])\?"),
    "A": re.compile(r"A:[k-t]{3,9}\?"),
}


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_recorded_question_is_of_a_task_and_has_the_gold_response(path):
    entries = json.loads(path.read_text())
    assert entries
    for entry in entries:
        assert PATTERNS[synthetic.task_of(entry["question"])].fullmatch(entry["question"])
        assert synthetic.gold(entry["question"]) == entry["gold"]


def test_gold_of_the_four_tasks():
    assert synthetic.gold("R:abca?") == "a>b>c>a."
    assert synthetic.gold("S:7+1+7+5?") == "0+7=7;7+1=8;8+7=15;15+5=20;A20."
    assert synthetic.gold("Q:8,6?") == "8,9,10,11,12,13."
    assert synthetic.gold("A:ktk?") == "kkkkttttkkkk=ktk."


@pytest.mark.parametrize("prompt", ["", "X:abc?", "R:abc", "S:1+x+2?", "Q:1?", "S:?"])
def test_refuses_other_prompts(prompt):
    with pytest.raises(DataError, match="not a prompt of the synthetic tasks"):
        synthetic.gold(prompt)


def test_examples_have_the_form_of_their_task_in_equal_shares_and_right_responses():
    for examples in (synthetic.train_examples(3, 4_000), synthetic.held_out_examples(3, 400)):
        for index, example in enumerate(examples):
            task = synthetic.task_of(example.prompt)
            assert task == synthetic.TASKS[index % 4]
            assert PATTERNS[task].fullmatch(example.prompt), example
            assert example == Example(example.prompt, synthetic.gold(example.prompt))


def test_splits_never_share_a_prompt_whatever_the_seeds():
    train = {example.prompt for seed in (0, 1) for example in synthetic.train_examples(seed, 20_000)}
    held_out = {example.prompt for seed in (0, 2) for example in synthetic.held_out_examples(seed, 566)}
    assert not train & held_out
    assert not any(map(synthetic.is_held_out, train)) and all(map(synthetic.is_held_out, held_out))


def test_held_out_prompts_are_unique_and_a_larger_count_appends():
    most = synthetic.held_out_examples(0, 566)
    assert len({example.prompt for example in most}) == len(most) == 566
    assert synthetic.held_out_examples(0, 400) == most[:400]
    with pytest.raises(DataError, match="one example in 4 is of that task: ask for at most 566"):
        synthetic.held_out_examples(0, 567)
    assert len(synthetic.held_out_examples(0, 600, "RSA4")) == 600
    assert len(synthetic.held_out_examples(0, 283, "RQ")) == 283
    with pytest.raises(DataError, match="one example in 2 is of that task: ask for at most 283"):
        synthetic.held_out_examples(0, 284, "RQ")


def test_an_example_is_a_function_of_seed_and_index():
    examples = synthetic.train_examples(5, 100)
    assert synthetic.train_example(5, 77) == examples[77]
    assert synthetic.train_examples(6, 100) != examples
    # Written down so that runs of the same seed stay comparable.
    assert [example.prompt for example in synthetic.train_examples(0, 4)] == [
        "R:ciefbgfdbehibccjgiagdfg?",
        "S:4+6+6?",
        "Q:38,9?",
        "A:qmqm?",
    ]


def test_tasks_come_in_the_turn_that_is_asked_for():
    for examples in (synthetic.train_examples(0, 60, "46RSQA"), synthetic.held_out_examples(0, 60, "46RSQA")):
        assert "".join(synthetic.task_of(example.prompt) for example in examples) == 10 * "46RSQA"
    assert synthetic.train_examples(0, 20, "RSQA") == synthetic.train_examples(0, 20)
    assert synthetic.train_example(0, 7, "46R") == synthetic.train_examples(0, 8, "46R")[7]
    train = {example.prompt for example in synthetic.train_examples(0, 4_000, "46")}
    held_out = {example.prompt for example in synthetic.held_out_examples(0, 1_000, "46")}
    assert not train & held_out and len(held_out) == 1_000


def test_the_tasks_are_those_that_can_be_set():
    assert set(synthetic.HELD_OUT_SHARES) == set(SYNTHETIC_TASKS)


def test_lengths_are_uniform():
    examples = synthetic.train_examples(0, 40_000)
    lengths = collections.Counter(len(example.prompt) - 3 for example in examples if example.prompt[0] == "R")
    assert set(lengths) == set(range(4, 24))
    assert all(400 < count < 600 for count in lengths.values())  # 500 expected, standard deviation 22


def test_generation_is_fast():
    start = time.perf_counter()
    synthetic.train_examples(0, 20_000, "RSQA46")
    assert time.perf_counter() - start < 3  # 50 microseconds an example would be 1
