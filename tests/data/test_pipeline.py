import json
import pathlib
import threading
import time

import numpy as np
import pytest

from refusion_jax.config import DataConfig
from refusion_jax.data import synthetic
from refusion_jax.data.pipeline import iterate, load_dataset, make_batches
from refusion_jax.data.records import DataError

GSM8K = pathlib.Path(__file__).parents[2] / "../shared/data/gsm8k"


def write_jsonl(path, count, prefix="", field="query"):
    rows = [{field: f"{prefix}{i}?", "response": f"{prefix}{i}."} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def decoded(dataset, split, index):
    start, end = split.offsets[index : index + 2]
    return dataset.tokenizer.decode(split.tokens[start:end])


def test_synthetic_dataset():
    dataset = load_dataset(DataConfig(synthetic_examples=400, eval_examples=40), seed=1)
    assert len(dataset.train) == dataset.counts.train.kept == 400
    assert dataset.held_out_examples == synthetic.held_out_examples(1, 40)
    for index, example in enumerate(dataset.held_out_examples):
        assert decoded(dataset, dataset.held_out, index) == example.prompt + example.response
    again = load_dataset(DataConfig(synthetic_examples=400, eval_examples=0), seed=1)
    np.testing.assert_array_equal(again.train.tokens, dataset.train.tokens)
    assert len(again.held_out) == 0


def test_json_holds_out_the_last_examples(tmp_path):
    file = write_jsonl(tmp_path / "train.jsonl", 10)
    dataset = load_dataset(DataConfig(source="json", train_files=(file,), eval_examples=3), seed=0)
    assert len(dataset.train) == 7 and decoded(dataset, dataset.train, 6) == "6?6."
    assert [example.prompt for example in dataset.held_out_examples] == ["7?", "8?", "9?"]
    assert dataset.counts.read.read == 10
    with pytest.raises(DataError, match=r"eval_examples is 10, but the training files have 10 .*eval_files"):
        load_dataset(DataConfig(source="json", train_files=(file,), eval_examples=10), seed=0)


def test_json_with_eval_files_and_a_dropped_held_out_example(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", 4)
    held_out = write_jsonl(tmp_path / "eval.jsonl", 12, prefix="1")
    config = DataConfig(source="json", train_files=(train,), eval_files=(held_out,), max_length=7)
    dataset = load_dataset(config, seed=0)
    assert len(dataset.train) == 4 and dataset.counts.held_out.too_long == 2
    assert [example.prompt for example in dataset.held_out_examples] == [f"1{i}?" for i in range(10)]


def test_refuses_files_without_examples(tmp_path):
    file = tmp_path / "empty.jsonl"
    file.write_text('{"query": "", "response": "a"}')
    with pytest.raises(DataError, match=r"empty\.jsonl: no example to train on; of 1 read, 1 have an empty prompt"):
        load_dataset(DataConfig(source="json", train_files=(str(file),)), seed=0)
    with pytest.raises(DataError, match="None of the 4 examples"):
        file = write_jsonl(tmp_path / "train.jsonl", 4)
        load_dataset(DataConfig(source="json", train_files=(file,), eval_examples=0, max_length=3), seed=0)


def test_a_given_tokenizer_is_used(tmp_path):
    config = DataConfig(synthetic_examples=40, eval_examples=4)
    first = load_dataset(config, seed=0)
    first.tokenizer.save(tmp_path)
    files = DataConfig(source="json", train_files=(write_jsonl(tmp_path / "t.jsonl", 9),), eval_examples=1)
    by_path = load_dataset(DataConfig(**{**vars(files), "tokenizer": str(tmp_path)}), seed=0)
    by_object = load_dataset(files, seed=0, tokenizer=first.tokenizer)
    assert by_path.tokenizer.vocab_size == by_object.tokenizer.vocab_size == first.tokenizer.vocab_size
    np.testing.assert_array_equal(by_path.train.tokens, by_object.train.tokens)


@pytest.mark.skipif(not GSM8K.exists(), reason="shared/data/gsm8k is not here")
def test_gsm8k(tmp_path):
    config = DataConfig(
        source="json", train_files=(str(GSM8K / "test.jsonl"),), prompt_field="question", response_field="answer",
        eval_examples=100, max_length=512, tokenizer_type="bpe", tokenizer_vocab_size=500,
    )  # fmt: skip
    dataset = load_dataset(config, seed=0)
    assert dataset.tokenizer.vocab_size == 500
    assert len(dataset.train) + dataset.counts.train.too_long == 1_219
    for index, example in enumerate(dataset.held_out_examples):
        assert decoded(dataset, dataset.held_out, index) == example.prompt + example.response


@pytest.fixture(scope="module")
def batches():
    config = DataConfig(synthetic_examples=400, eval_examples=4)
    return make_batches(config, load_dataset(config, seed=0).train, seed=0, batch_size=8)


@pytest.mark.parametrize(("start", "threads", "prefetch"), [(0, 1, 8), (15, 4, 3), (0, 3, 40)])
def test_iterate_gives_the_batches_of_each_step_in_order(batches, start, threads, prefetch):
    iterator = iterate(batches, start, read_threads=threads, prefetch=prefetch)
    for step in range(start, start + 60):  # through several epochs
        batch = next(iterator)
        for name, array in batches[step].items():
            np.testing.assert_array_equal(batch[name], array)
    iterator.close()


class Counted:
    """Random access that counts and, from step 100, fails."""

    def __init__(self):
        self.steps = []

    def __len__(self):
        return 1_000

    def __getitem__(self, step):
        if step >= 100:
            raise DataError(f"step {step} is broken")
        self.steps.append((step, threading.current_thread()))
        return {"step": np.array(step)}


def wait_for(condition):
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_iterate_reads_ahead_in_other_threads_but_not_without_bound():
    source = Counted()
    iterator = iterate(source, 10, read_threads=2, prefetch=5)
    assert wait_for(lambda: len(source.steps) == 5)
    assert next(iterator)["step"] == 10
    assert wait_for(lambda: len(source.steps) == 6)
    time.sleep(0.05)
    assert sorted(step for step, _ in source.steps) == [10, 11, 12, 13, 14, 15]
    assert threading.current_thread() not in {thread for _, thread in source.steps}
    iterator.close()


def test_iterate_passes_errors_on():
    iterator = iterate(Counted(), 99, read_threads=1, prefetch=2)
    assert next(iterator)["step"] == 99
    with pytest.raises(DataError, match="step 100 is broken"):
        next(iterator)
    iterator.close()
