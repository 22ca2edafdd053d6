"""ArrayRecord files, TFDS datasets and remote files, and what tells their versions apart."""

import dataclasses
import io
import json
from pathlib import Path
from typing import ClassVar

import byte_level
import fsspec
import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem

from refusion_jax.config import DataConfig
from refusion_jax.data.examples import DataError, Example, ReadCounts
from refusion_jax.data.readers import fingerprint_entry, read_objects
from refusion_jax.data.records import read_entry
from refusion_jax.data.tokenizer_files import find_tokenizer, load_tokenizer

ROWS = [{"query": f"{i}? é", "response": f"{i}."} for i in range(3)]


def write_array_record(path, records, options="group_size:1"):
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record if isinstance(record, bytes) else json.dumps(record).encode())
    writer.close()
    return str(path)


@pytest.mark.parametrize("options", ["group_size:1", "group_size:16"])
def test_array_records_are_objects_in_order(tmp_path, options, monkeypatch):
    monkeypatch.setattr("refusion_jax.data.readers._CHUNK", 2)
    file = write_array_record(tmp_path / "data", ROWS, options)
    assert list(read_objects("arrayrecord", file)) == [
        (f"{file}, record {number}", row) for number, row in enumerate(ROWS, 1)
    ]
    config = DataConfig(source="arrayrecord", train_files=(file,))
    assert read_entry(config, file) == ([Example(**old(row)) for row in ROWS], ReadCounts(read=3))
    assert list(read_objects("arrayrecord", write_array_record(tmp_path / "none", []))) == []


def old(row):
    return {"prompt": row["query"], "response": row["response"]}


def test_refuses_what_is_no_array_record(tmp_path):
    def fails(path):
        with pytest.raises(DataError) as error:
            read_entry(DataConfig(source="arrayrecord", train_files=(str(path),)), str(path))
        message = str(error.value)
        assert message.startswith(str(path)) and message.count("\n") == 0 and message.endswith("."), message
        return message

    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps(ROWS[0]) * 5_000)
    assert "expected an ArrayRecord file" in fails(lines)
    assert "no such file" in fails(tmp_path / "nowhere")
    assert "cannot be read" in fails(tmp_path)
    whole = write_array_record(tmp_path / "whole", ROWS)
    (tmp_path / "cut").write_bytes(Path(whole).read_bytes()[:70_000])
    assert "cannot be read" in fails(tmp_path / "cut")
    content = bytearray(Path(whole).read_bytes())
    content[70] ^= 255
    (tmp_path / "flipped").write_bytes(content)
    assert "cannot be read" in fails(tmp_path / "flipped")


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (b'{"query": ', ["record 2", "expected a JSON object", "column"]),
        (b"\xff", ["record 2", "UTF-8"]),
        (b'{"query": "a"}', ["record 2", "'response'", "'query'"]),
        (b"7", ["record 2", "object", "7"]),
        (b"[" * 100_000, ["record 2", "nested too deeply"]),
    ],
)
def test_refuses_records_of_another_form(tmp_path, record, parts):
    file = write_array_record(tmp_path / "data", [ROWS[0], record])
    with pytest.raises(DataError) as error:
        read_entry(DataConfig(source="arrayrecord", train_files=(file,)), file)
    assert all(part in str(error.value) for part in [file, *parts]), error.value


@pytest.fixture(scope="module")
def tfds_directory(tmp_path_factory):
    """A prepared dataset of five questions and answers, images, and conversations."""

    class Tiny(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        code_path = None  # would have TFDS look for files beside this one

        def _info(self):
            turn = {"role": tfds.features.Text(), "content": tfds.features.Text()}
            features = {
                "question": tfds.features.Text(),
                "answer": tfds.features.Text(),
                "number": tfds.features.Scalar(np.int64),
                "raw": tfds.features.Text(),
                "messages": tfds.features.Sequence(turn),
            }
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(4), "test": self._generate_examples(1)}

        def _generate_examples(self, count):
            for i in range(count):
                turns = [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]
                yield i, {"question": f"é{i}?", "answer": f"a{i}", "number": i, "raw": b"\xff", "messages": turns}

    directory = tmp_path_factory.mktemp("tfds")
    builder = Tiny(data_dir=directory, file_format="array_record")
    tfds.display_progress_bar(False)
    builder.download_and_prepare()
    return directory


def tfds_config(entry, **fields):
    return DataConfig(source="tfds", train_files=(entry,), prompt_field="question", response_field="answer", **fields)


def test_tfds_by_directory_and_split(tfds_directory):
    entry = f"{tfds_directory}/tiny/1.0.0[train]"
    examples, counts = read_entry(tfds_config(entry), entry)
    assert sorted(example.prompt for example in examples) == [f"é{i}?" for i in range(4)] and counts.read == 4
    assert all(example.response == f"a{example.prompt[1]}" for example in examples)
    part = f"{tfds_directory}/tiny/1.0.0[train[1:3]]"
    assert read_entry(tfds_config(part), part)[0] == examples[1:3]
    chat, _ = read_entry(tfds_config(entry, format="messages"), entry)
    assert chat[0].response == examples[0].response
    assert chat[0].prompt == f"<|im_start|>user\nq{chat[0].response[1]}<|im_end|>\n<|im_start|>assistant\n"


def test_tfds_by_name(tfds_directory, monkeypatch):
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tfds_directory))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_directory))
    entry = "tiny:1.0.0[test]"
    assert read_entry(tfds_config(entry), entry)[0] == [Example("é0?", "a0")]


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ("tiny", "a TFDS name and a split, such as"),
        ("no/such_dataset:1.0.0[train]", "there is no prepared TFDS dataset"),
        ("DIR[validation]", "Unknown split"),
        ("DIR[train[]", "split"),
    ],
)
def test_refuses_tfds_datasets_that_are_not_there(tfds_directory, entry, part):
    entry = entry.replace("DIR", f"{tfds_directory}/tiny/1.0.0")
    for call in (lambda: read_entry(tfds_config(entry), entry), lambda: fingerprint_entry("tfds", entry)):
        with pytest.raises(DataError) as error:
            call()
        message = str(error.value)
        assert message.startswith(entry) and part in message and "\n" not in message, message


@pytest.mark.parametrize(
    ("field", "part"), [("reply", "'reply', but the fields there are"), ("number", "string"), ("raw", "string")]
)
def test_refuses_tfds_features_that_are_no_text(tfds_directory, field, part):
    entry = f"{tfds_directory}/tiny/1.0.0[test]"
    config = dataclasses.replace(tfds_config(entry, format="pairs"), response_field=field)
    with pytest.raises(DataError, match=part) as error:
        read_entry(config, entry)
    assert str(error.value).startswith(f"{entry}, record 1: ")


def test_fingerprints_change_with_content_and_split(tmp_path, tfds_directory):
    file = tmp_path / "data.jsonl"
    seen = set()
    for text in ("a" * 3_000_000, "a" * 2_000_001 + "b" + "a" * 999_998, "a"):
        file.write_text(text)
        seen.add(fingerprint_entry("json", str(file)))
    for split in ("train", "test", "train[1:3]"):
        seen.add(fingerprint_entry("tfds", f"{tfds_directory}/tiny/1.0.0[{split}]"))
    assert len(seen) == 6
    copy = tmp_path / "elsewhere" / "data.jsonl"
    copy.parent.mkdir()
    copy.write_text("a")
    assert fingerprint_entry("json", str(copy)) == fingerprint_entry("json", str(file))


class Bucket(MemoryFileSystem):
    """A file system in memory under `gs://`."""

    protocol = ("gcs", "gs")
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("gs://", "memory://"))


@pytest.fixture
def bucket(monkeypatch):
    fsspec.register_implementation("gcs", Bucket, clobber=True)
    backend._FileSystemSpecBackend._get_filesystem.cache_clear()
    Bucket.store.clear()
    yield Bucket()
    backend._FileSystemSpecBackend._get_filesystem.cache_clear()


def test_reads_and_tells_apart_files_on_gs(tmp_path, bucket):
    bucket.pipe("gs://bucket/data.jsonl", "\n".join(map(json.dumps, ROWS)).encode())
    bucket.pipe("gs://bucket/data.array", Path(write_array_record(tmp_path / "a", ROWS)).read_bytes())
    for source, file in (("json", "gs://bucket/data.jsonl"), ("arrayrecord", "gs://bucket/data.array")):
        assert [row for _, row in read_objects(source, file)] == ROWS
        before = fingerprint_entry(source, file)
        bucket.pipe(file, b"other")
        assert fingerprint_entry(source, file) != before
        with pytest.raises(DataError, match=r"gs://bucket/nowhere: there is no such file"):
            list(read_objects(source, "gs://bucket/nowhere"))


def test_refuses_a_bucket_that_fails(bucket, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no credentials\nat all")

    monkeypatch.setattr(Bucket, "open", fail)
    with pytest.raises(DataError, match=r"gs://bucket/a: the file cannot be read \(no credentials\)\."):
        list(read_objects("json", "gs://bucket/a"))


def test_cache_and_tokenizer_on_gs(tmp_path, bucket):
    from refusion_jax.data.pipeline import load_dataset

    bucket.pipe("gs://bucket/data.jsonl", "\n".join(map(json.dumps, ROWS)).encode())
    config = DataConfig(
        source="json", train_files=("gs://bucket/data.jsonl",), eval_examples=1, cache_dir="gs://bucket/cache"
    )
    first, again = load_dataset(config, seed=0), load_dataset(config, seed=0)
    np.testing.assert_array_equal(first.train.tokens, again.train.tokens)
    assert first.fingerprint == again.fingerprint and again.held_out_examples == first.held_out_examples
    names = [name for name in bucket.find("gs://bucket/cache") if name.endswith(".npy")]
    assert len(names) == 8 and np.load(io.BytesIO(bucket.cat(names[-1]))).size
    first.tokenizer.save(tmp_path)
    bucket.pipe("gs://bucket/t/tokenizer.model", (tmp_path / "tokenizer.model").read_bytes())
    given = DataConfig(**{**vars(config), "tokenizer": "gs://bucket/t"})
    assert load_dataset(given, seed=0).fingerprint == first.fingerprint


def test_a_tokenizer_json_on_gs(tmp_path, bucket):
    tokenizer = load_tokenizer(byte_level.write(tmp_path / "t"))
    tokenizer.save("gs://bucket/t")
    for path in ("gs://bucket/t", "gs://bucket/t/tokenizer.json"):
        assert load_tokenizer(path).files == tokenizer.files
    assert find_tokenizer("gs://bucket/nothing") is None
