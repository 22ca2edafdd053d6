"""Reading the files of benchmarks."""

import gzip
import json

import pytest

from refusion_jax.config import ConfigError
from refusion_jax.evaluation.data_files import find_file, read_objects


def test_files_may_lie_in_the_folder_itself_or_in_that_of_the_data_set(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "b").write_text("")
    assert find_file(tmp_path, "set", ("a", "b")) == tmp_path / "set" / "b"
    (tmp_path / "a").write_text("")
    assert find_file(tmp_path, "set", ("a", "b")) == tmp_path / "a"
    with pytest.raises(ConfigError, match=r"No c or d in .*set; put the file of set there, or name its directory"):
        find_file(tmp_path, "set", ("c", "d"))


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"a": "1", "b": "2"}\n[]\n', r"Line 2 of .* is no JSON object \{\"a\": \"...\", \"b\": \"...\"\} with str"),
        (b'{"a": "1", "b": 2}\n', "Line 1 of"),
        (b'\n{"a": "1"}\n', "Line 2 of"),
        (b"{\n", "Line 1 of"),
        (b"\xff\n", "Line 1 of"),
    ],
)
def test_lines_of_something_else_are_refused(tmp_path, content, message):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        list(read_objects(tmp_path / "file", ("a", "b")))


def test_compressed_files_may_be_broken(tmp_path):
    whole = gzip.compress(json.dumps({"a": "x" * 100}).encode())
    path = tmp_path / "file.gz"
    path.write_bytes(whole)
    assert [(number, len(line["a"])) for number, line in read_objects(path, ("a",))] == [(1, 100)]
    for broken in (whole[:20], whole[:-6] + b"wrong!", b"no gzip"):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"file\.gz cannot be read \(.*\); give a readable file of JSON lines"):
            list(read_objects(path, ("a",)))


def test_a_file_that_is_not_there_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        list(read_objects(tmp_path / "none", ("a",)))
