import contextlib
import json
import pathlib
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from refusion_jax.config import DataConfig
from refusion_jax.data import pipeline, synthetic
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


def test_the_last_of_each_source_are_held_out_in_proportion(tmp_path):
    files = tuple(write_jsonl(tmp_path / name, count, prefix=name) for name, count in (("a", 10), ("b", 4), ("c", 1)))
    dataset = load_dataset(DataConfig(source="json", train_files=files, eval_examples=4), seed=0)
    assert [example.prompt for example in dataset.held_out_examples] == ["a7?", "a8?", "a9?", "b3?"]
    assert dataset.train.source_sizes == (7, 3, 1) and dataset.held_out.source_sizes == ()
    assert [decoded(dataset, dataset.train, index) for index in (0, 6, 7, 10)] == [
        "a0?a0.",
        "a6?a6.",
        "b0?b0.",
        "c0?c0.",
    ]
    assert dataset.counts.read.read == 15 and dataset.counts.train.kept == 11
    with pytest.raises(DataError, match="eval_examples is 15, but the training files have 15 examples"):
        load_dataset(DataConfig(source="json", train_files=files, eval_examples=15), seed=0)


def test_weights_mix_training_examples_only(tmp_path):
    files = write_jsonl(tmp_path / "a", 10, "a"), write_jsonl(tmp_path / "b", 30, "b")
    config = DataConfig(source="json", train_files=files, eval_examples=4, weights=(3.0, 1.0))
    dataset = load_dataset(config, seed=0)
    train = make_batches(config, dataset.train, seed=0, batch_size=2)
    ids = np.concatenate([train[step]["example_ids"] for step in range(train.batches_in_epoch(0))])
    assert ((ids >= 0) & (ids < 9)).sum() == 27 and (ids >= 9).sum() == 9
    held_out = make_batches(config, dataset.held_out, seed=0, batch_size=1)
    assert sum((held_out[step]["example_ids"] >= 0).sum() for step in range(held_out.batches_in_epoch(0))) == 4
    with pytest.raises(DataError, match=r"long: no example can be used, but data\.weights gives it 1\.0"):
        long = tmp_path / "long"
        long.write_text(json.dumps({"query": "q" * 200, "response": "r"}))
        load_dataset(DataConfig(**{**vars(config), "train_files": (files[0], str(long)), "eval_examples": 0}), seed=0)


def test_documents_are_cut_to_the_training_length(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text("\n".join(json.dumps({"text": letter * length}) for letter, length in (("a", 40), ("b", 5))))
    config = DataConfig(source="json", train_files=(str(file),), format="text", max_length=16, eval_examples=1)
    dataset = load_dataset(config, seed=0)
    assert dataset.train.lengths.tolist() == [16, 16, 9] and not dataset.train.prompt_lengths.any()
    assert [example.response for example in dataset.held_out_examples] == ["b" * 5]
    batch = make_batches(config, dataset.train, seed=0, batch_size=3)[0]
    assert batch["response_lengths"].sum() == 41 and not batch["prompt_lengths"].any()


def test_the_cache_gives_what_reading_gives(tmp_path):
    files = write_jsonl(tmp_path / "a", 10, "a"), write_jsonl(tmp_path / "b", 30, "b")
    plain = DataConfig(source="json", train_files=files, eval_examples=4)
    kept = DataConfig(**{**vars(plain), "cache_dir": str(tmp_path / "cache")})
    expected = load_dataset(plain, seed=0)
    for _ in range(2):
        dataset = load_dataset(kept, seed=0)
        assert dataset.fingerprint == expected.fingerprint and dataset.counts == expected.counts
        assert dataset.held_out_examples == expected.held_out_examples
        np.testing.assert_array_equal(dataset.train.tokens, expected.train.tokens)
        assert dataset.train.source_sizes == expected.train.source_sizes
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [expected.fingerprint]


def test_a_cached_dataset_is_not_read_again(tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "a", 10)
    config = DataConfig(source="json", train_files=(file,), eval_examples=1, cache_dir=str(tmp_path / "cache"))
    first = load_dataset(config, seed=0)
    monkeypatch.setattr("refusion_jax.data.splits.read_entry", lambda *_: pytest.fail("the file was read"))
    again = load_dataset(config, seed=0, tokenizer=first.tokenizer)
    np.testing.assert_array_equal(again.train.tokens, first.train.tokens)


def test_the_fingerprint_tells_files_tokenizers_and_settings_apart(tmp_path):
    file = write_jsonl(tmp_path / "a", 10)
    config = DataConfig(source="json", train_files=(file,), eval_examples=1, cache_dir=str(tmp_path / "cache"))
    first = load_dataset(config, seed=0)

    def changed(tokenizer=first.tokenizer, **fields):
        return load_dataset(DataConfig(**{**vars(config), **fields}), seed=0, tokenizer=tokenizer).fingerprint

    assert changed() == changed(prefetch=3, workers=2, cache_dir="") == load_dataset(config, seed=9).fingerprint
    other = load_dataset(DataConfig(synthetic_examples=40, eval_examples=4), seed=0)
    prints = [first.fingerprint, changed(tokenizer=other.tokenizer), changed(eval_examples=2), changed(max_length=64),
              changed(eval_files=(file,))]  # fmt: skip
    content = (tmp_path / "a").read_text()
    (tmp_path / "a").write_text(content.replace("3?", "4?"))
    prints.append(changed())
    (tmp_path / "a").write_text(content)
    assert changed() == first.fingerprint
    prints += [load_dataset(DataConfig(synthetic_examples=count, eval_examples=4), seed=seed).fingerprint
               for count, seed in ((40, 0), (40, 1), (41, 0))]  # fmt: skip
    prints += [load_dataset(DataConfig(synthetic_examples=40, eval_examples=4, **more), seed=0).fingerprint
               for more in ({"synthetic_tasks": "RS46"}, {"pad_responses": 8})]  # fmt: skip
    assert len(set(prints)) == len(prints)


def test_runs_from_before_a_setting_was_there_go_on():
    """What the default configuration's fingerprint always was."""
    tokenizer = SimpleNamespace(fingerprint="tokenizer")
    assert pipeline._fingerprint(DataConfig(), 0, tokenizer) == (
        "5065ea0abb4d5e784b8268b7cbca6fc62b489bce7f995fa92889900717af2982"
    )


@pytest.mark.parametrize("pack", [False, True])
def test_both_splits_are_of_the_tasks_and_filled_up(pack):
    config = DataConfig(
        synthetic_examples=60, eval_examples=30, synthetic_tasks="4R", pad_responses=16, max_length=96, pack=pack
    )
    dataset = load_dataset(config, seed=0)
    assert dataset.held_out_examples == synthetic.held_out_examples(0, 30, "4R")
    for examples in (dataset.train, dataset.held_out):
        batch = make_batches(config, examples, seed=0, batch_size=8)[0]
        assert not (batch["response_lengths"] % 16).any() and batch["response_lengths"].max() >= 32
        row, segment = np.argwhere(batch["response_lengths"] > 0)[-1]
        tokens = batch["tokens"][row][batch["segment_ids"][row] == segment + 1]
        example = batch["example_ids"][row, segment]
        np.testing.assert_array_equal(tokens, examples.tokens[slice(*examples.offsets[example : example + 2])])


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


@pytest.mark.parametrize("mapped", [False, True])
def test_processes_give_the_batches_of_each_step_in_order(tmp_path, mapped):
    config = DataConfig(synthetic_examples=200, eval_examples=4, cache_dir=str(tmp_path) if mapped else "")
    examples = load_dataset(config, seed=0).train
    assert isinstance(examples.tokens, np.memmap) == mapped
    batches = make_batches(config, examples, seed=0, batch_size=8, rows=np.array([1, 5]))
    jax.devices()  # the processes start beside an initialised JAX
    iterator = iterate(batches, 5, read_threads=2, prefetch=4, workers=2 if mapped else 1)
    with contextlib.closing(iterator):
        for step in range(5, 40):  # through several epochs
            batch = next(iterator)
            for name, array in batches[step].items():
                np.testing.assert_array_equal(batch[name], array)
                assert batch[name].dtype == array.dtype
                assert type(batch[name]) is type(array) is np.ndarray  # neither shared memory nor a mapped file


def test_processes_pass_errors_on():
    iterator = iterate(FailingFrom(3), 2, read_threads=1, prefetch=2, workers=1)
    with contextlib.closing(iterator):
        assert next(iterator)["step"] == 2
        with pytest.raises(DataError, match="step 3 is broken"):
            next(iterator)


class FailingFrom:
    """Random access that can be pickled and fails from a step on."""

    def __init__(self, step):
        self.first = step

    def __len__(self):
        return 1_000

    def __getitem__(self, step):
        if step >= self.first:
            raise DataError(f"step {step} is broken")
        return {"step": np.array(step)}


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
