"""What an evaluation has computed, on disk."""

import pytest

from refusion_jax.config import ConfigError
from refusion_jax.evaluation.journal import FILE_NAME, Journal, request_key
from refusion_jax.processes import Process

IDENTITY = {"checkpoint": "/runs/a", "seed": 0}


def journal(directory, identity=IDENTITY, process=0, count=1):
    return Journal(directory, identity, Process(process, count))


def test_records_are_found_again(tmp_path):
    with journal(tmp_path / "new" / "place") as first:
        assert first.records == {}
        first.add("a", {"text": "né\n\ud800", "tokens": 3}, 3)
        first.add("b", {"value": -1.5}, 1)
    with journal(tmp_path / "new" / "place") as again:
        assert again.records == {"a": {"text": "né\n\ud800", "tokens": 3}, "b": {"value": -1.5}}


def test_a_record_that_was_cut_off_is_not_there(tmp_path):
    with journal(tmp_path) as first:
        first.add("a", {"n": 1}, 1)
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b'{"key": "b", "n"')
    with journal(tmp_path) as again:
        assert again.records == {"a": {"n": 1}}
        again.add("b", {"n": 2}, 1)
    with journal(tmp_path) as last:
        assert last.records == {"a": {"n": 1}, "b": {"n": 2}}


def test_processes_read_each_others_records(tmp_path):
    with journal(tmp_path, process=0, count=2) as zero, journal(tmp_path, process=1, count=2) as one:
        zero.add("a", {"n": 1}, 1)
        one.add("b", {"n": 2}, 1)
        assert (zero.records, one.records) == ({"a": {"n": 1}}, {"b": {"n": 2}})
    for process, count in ((0, 1), (0, 2), (1, 2), (2, 3)):
        with journal(tmp_path, process=process, count=count) as again:
            assert again.records == {"a": {"n": 1}, "b": {"n": 2}}


def test_another_evaluation_is_refused(tmp_path):
    with journal(tmp_path) as first:
        first.add("a", {}, 0)
    with pytest.raises(ConfigError, match=r"belongs to a run with seed 0, not 1"):
        journal(tmp_path, IDENTITY | {"seed": 1})


def test_a_directory_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output .*file cannot be written: it is a file; name a directory"):
        journal(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"--output .*file.* cannot be written"):
        journal(tmp_path / "file" / "below")


def test_keys_tell_requests_apart():
    assert request_key("a", [1, 2]) == request_key("a", [1, 2])
    assert len({request_key(*parts) for parts in (("a", [1, 2]), ("a", [12]), ("a", "[1, 2]"), ("\ud800",))}) == 4
