"""Answer files and their journals: every point at which a run may die, runs that differ, and several processes."""

import json
import os
import shutil

import pytest

from refusion_jax import answers, files
from refusion_jax.answers import ANSWERED, FAILED, UNANSWERED, Answers, read_answers
from refusion_jax.config import ConfigError

IDENTITY = {"checkpoint": "/runs/demo", "slot_size": 8, "stop": ["x,y"], "prefix": None, "slot_threshold": 0.1}
LINES = [5, 2, 9, 1, 4]  # as they finish; line 2 has an error
TEXTS = {
    line: json.dumps({"line": line, "response": "ü" * line}, ensure_ascii=False).encode() + b"\n" for line in LINES
}
SORTED = b"".join(TEXTS[line] for line in sorted(LINES))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


def write(path, lines=LINES, identity=IDENTITY):
    """Appends what is not there yet, as a run does that is started again."""
    with Answers(path, identity) as out:
        for line in lines:
            if out.index.state(line) == UNANSWERED:
                out.append(line, TEXTS[line], tokens=line, failed=line == 2)


def finish(path):
    with Answers(path, IDENTITY) as out:
        out.sort()
        out.complete()


def content(path):
    return path.read_bytes(), answers.journal_path(path).read_bytes()


def put(path, data, journal):
    path.write_bytes(data)
    answers.journal_path(path).write_bytes(journal)


def check_whole(path):
    """Every answer is there once."""
    index = read_answers(path, IDENTITY, "--output")
    assert sorted(index.lines) == sorted(LINES)
    assert sorted(path.read_bytes().splitlines()) == sorted(SORTED.splitlines())
    assert (index.state(2), index.state(5), index.state(3), index.state(99)) == (
        FAILED,
        ANSWERED,
        UNANSWERED,
        UNANSWERED,
    )
    assert (index.failed, sum(index.tokens)) == (1, sum(LINES))


def test_answers_are_in_the_file_at_once_in_the_order_they_came(path):
    with Answers(path, IDENTITY) as out:
        for count, line in enumerate(LINES, 1):
            out.append(line, TEXTS[line], line, line == 2)
            assert path.read_bytes() == b"".join(TEXTS[line] for line in LINES[:count])
            assert len(out.index) == count
    check_whole(path)


def test_a_killed_run_goes_on_from_every_byte(path):
    """The file and its journal are cut where they stood when so many bytes of both had been written."""
    write(path)
    data, journal = content(path)
    header, *ends = [end for end, byte in enumerate(journal, 1) if byte == ord("\n")]
    states = [(0, count) for count in range(header + 1)]
    size, journal_size = 0, header
    for line, end in zip(LINES, ends, strict=True):
        states += [(size + count, journal_size) for count in range(len(TEXTS[line]) + 1)]
        size += len(TEXTS[line])
        states += [(size, count) for count in range(journal_size, end + 1)]
        journal_size = end
    for size, journal_size in states:
        put(path, data[:size], journal[:journal_size])
        with Answers(path, IDENTITY) as out:
            whole = sum(end <= journal_size for end in ends)
            assert list(out.index.lines) == LINES[:whole]
            assert path.read_bytes() == b"".join(TEXTS[line] for line in LINES[:whole])
        write(path)
        assert content(path) == (data, journal)


def test_a_machine_that_lost_the_end_of_the_file(path):
    write(path)
    data, journal = content(path)
    for size in range(len(TEXTS[LINES[0]]), len(data)):
        put(path, data[:size], journal)
        write(path)
        assert content(path) == (data, journal)


def test_sorting(path):
    write(path)
    finish(path)
    check_whole(path)
    data, journal = content(path)
    assert data == SORTED
    assert json.loads(journal.splitlines()[-1]) == {"complete": True}
    assert [json.loads(line)["line"] for line in journal.splitlines()[1:-1]] == sorted(LINES)
    assert sorted(os.listdir(path.parent)) == ["out.jsonl", "out.jsonl.journal"]
    finish(path)  # again: nothing changes
    assert content(path) == (data, journal)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("survives", [False, True], ids=["before the rename", "after the rename"])
@pytest.mark.parametrize("rename", [1, 2])
def test_sorting_killed_at_a_rename(rename, survives, path, monkeypatch):
    write(path)
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) == rename:
            if survives:
                real(source, target)
            raise Killed
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", replace)
        with pytest.raises(Killed):
            finish(path)
    check_whole(path)
    finish(path)
    check_whole(path)
    assert path.read_bytes() == SORTED


def test_leftover_temporary_files_are_in_no_ones_way(path):
    write(path)
    path.with_name("out.jsonl.tmp").write_bytes(b"half")
    path.with_name("out.jsonl.journal.tmp").write_bytes(b"half")
    finish(path)
    check_whole(path)
    assert sorted(os.listdir(path.parent)) == ["out.jsonl", "out.jsonl.journal"]


def test_a_sorted_file_with_the_journal_of_before(path):
    """Killed between the two renames: the journal follows when the file is opened."""
    write(path)
    _, journal = content(path)
    put(path, SORTED, journal)
    assert list(read_answers(path, IDENTITY, "--output").lines) == LINES
    with Answers(path, IDENTITY) as out:
        assert list(out.index.lines) == sorted(LINES)
        out.append(7, b"seventh\n", 0)
    assert path.read_bytes() == SORTED + b"seventh\n"
    assert list(read_answers(path, IDENTITY, "--output").lines) == [*sorted(LINES), 7]


def test_an_interruption_leaves_whole_answers(path, monkeypatch):
    def write_half(file, content):
        file.write(content[: len(content) // 2])
        raise KeyboardInterrupt

    write(path, LINES[:2])
    monkeypatch.setattr(answers, "_write", write_half)
    with pytest.raises(KeyboardInterrupt):
        write(path)
    assert path.read_bytes() == TEXTS[5] + TEXTS[2]
    monkeypatch.undo()
    write(path)
    check_whole(path)


def test_a_full_disk_is_one_sentence_and_leaves_whole_answers(path, monkeypatch):
    def full(file, content):
        file.write(content[:3])
        raise OSError(28, "No space left on device")

    write(path, LINES[:2])
    monkeypatch.setattr(answers, "_write", full)
    with pytest.raises(ConfigError, match=r"^--output .*out.jsonl cannot be written: No space left on device\.$"):
        write(path)
    assert path.read_bytes() == TEXTS[5] + TEXTS[2]


def test_writes_that_take_less_than_all(path):
    class File:
        def __init__(self):
            self.content = b""

        def write(self, content):
            self.content += bytes(content[:3])
            return min(3, len(content))

    file = File()
    answers._write(file, b"0123456789")
    assert file.content == b"0123456789"


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"slot_size": 16}, "slot_size 8, not 16"),
        ({"stop": ["x"]}, r"stop \['x,y'\], not \['x'\]"),
        ({"prefix": "p" * 200}, r"prefix None, not 'p+\.\.\."),
        ({"checkpoint": "/runs/other", "slot_size": 16}, "checkpoint '/runs/demo', not '/runs/other'"),
        ({"new": 1}, "new None, not 1"),
    ],
)
def test_a_file_of_another_run_is_refused_and_left_alone(changes, difference, path):
    write(path)
    before = content(path)
    expected = (
        rf"^--trace .*out\.jsonl belongs to a run with {difference}; delete it and out\.jsonl\.journal, or choose "
        r"another --trace\.$"
    )
    for open_file in (Answers, read_answers):
        with pytest.raises(ConfigError, match=expected):
            open_file(path, IDENTITY | changes, "--trace")
    assert content(path) == before


def test_a_setting_that_is_no_more_is_a_difference(path):
    write(path)
    with pytest.raises(ConfigError, match="slot_size 8, not None"):
        Answers(path, {name: value for name, value in IDENTITY.items() if name != "slot_size"})


@pytest.mark.parametrize("journal", [None, b"", b'{"identity": {"check'])
def test_a_file_without_a_journal_is_refused_and_left_alone(journal, path):
    path.write_bytes(b"precious\n")
    if journal is not None:
        answers.journal_path(path).write_bytes(journal)
    with pytest.raises(
        ConfigError, match=r"was not written by an unfinished run, or its journal out\.jsonl\.journal is gone"
    ):
        Answers(path, IDENTITY)
    assert path.read_bytes() == b"precious\n"
    assert answers.journal_path(path).exists() == (journal is not None)


@pytest.mark.parametrize("exists", [True, False])
def test_an_output_that_was_deleted_or_emptied_is_started_over_whatever_the_journal(exists, path):
    write(path)
    path.unlink()
    if exists:
        path.touch()
    other = IDENTITY | {"slot_size": 16}
    with Answers(path, other) as out:
        assert len(out.index) == 0
        out.append(1, TEXTS[1], 1)
    assert list(read_answers(path, other, "--output").lines) == [1]


@pytest.mark.parametrize("place", [0, 30, 60, -2])
def test_a_file_that_was_edited_is_refused_and_left_alone(place, path):
    write(path)
    data, journal = content(path)
    edited = bytearray(data)
    edited[place] ^= 1
    put(path, edited, journal)
    with pytest.raises(
        ConfigError, match=r"was changed after it was written, at its answer [1-5]; restore it, or delete"
    ):
        Answers(path, IDENTITY)
    assert content(path) == (edited, journal)


def test_another_short_file_in_its_place_is_refused(path):
    write(path)
    path.write_bytes(b"x\n")
    with pytest.raises(ConfigError, match="was changed after it was written, at its answer 1;"):
        Answers(path, IDENTITY)
    assert path.read_bytes() == b"x\n"


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"[]",
        b'{"line": 3}',
        b'{"line": -1, "bytes": 4, "crc32": 0, "tokens": 0, "error": false}',
        b'{"line": 1, "bytes": 4, "crc32": 0, "tokens": 0, "error": 0}',
    ],
)
def test_a_damaged_journal_is_refused(line, path):
    write(path)
    data, journal = content(path)
    header, *entries = journal.splitlines()
    put(path, data, b"\n".join([header, line, *entries]) + b"\n")
    with pytest.raises(ConfigError, match=r"its journal out\.jsonl\.journal is damaged; delete both to start over\.$"):
        Answers(path, IDENTITY)
    assert path.read_bytes() == data


def test_a_file_that_another_process_writes_is_refused(path):
    with Answers(path, IDENTITY) as out:
        out.append(1, TEXTS[1], 1)
        with pytest.raises(
            ConfigError, match="is being written by another run; wait for it, stop it, or choose another"
        ):
            Answers(path, IDENTITY)
        assert list(read_answers(path, IDENTITY, "--output").lines) == [1]  # reading is free
    write(path)


def test_paths_that_no_run_could_use(tmp_path, path):
    answers.check_free(path, "--output")
    with pytest.raises(ConfigError, match=f"--output {tmp_path} cannot be written: it is a directory"):
        answers.check_free(tmp_path, "--output")
    with pytest.raises(ConfigError, match="nowhere is not a directory one can write to"):
        answers.check_free(tmp_path / "nowhere" / "out.jsonl", "--output")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is not a regular file"):
        answers.check_free(tmp_path / "pipe", "--output")


def test_parts_of_other_processes_are_gathered_once(path, tmp_path):
    parts = [answers.part_path(path, process) for process in (1, 2, 10)]
    assert [part.name for part in parts] == ["out.jsonl.p1", "out.jsonl.p2", "out.jsonl.p10"]
    write(path, [5])
    write(parts[0], [2, 9])
    write(parts[2], [1, 4])
    Answers(parts[1], IDENTITY).close()
    (tmp_path / "out.jsonl.p3").write_text("someone else's")
    (tmp_path / "out.jsonl.px.journal").write_text("someone else's")
    assert answers.find_parts(path) == parts
    for _ in range(2):  # as after a kill between gathering and removing
        with Answers(path, IDENTITY) as out:
            for part in parts:
                out.gather(part)
            out.sort()
        check_whole(path)
        assert path.read_bytes() == SORTED
    for part in parts:
        answers.remove_part(part)
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "out.jsonl.journal", "out.jsonl.p3", "out.jsonl.px.journal"]


def test_a_part_half_removed_is_nothing(path):
    part = answers.part_path(path, 1)
    write(part)
    part.unlink()
    assert len(read_answers(part, IDENTITY, "--output")) == 0
    with Answers(path, IDENTITY) as out:
        out.gather(part)
        assert len(out.index) == 0


def test_a_part_of_another_run_is_refused(path):
    part = answers.part_path(path, 1)
    write(part, identity=IDENTITY | {"slot_size": 16})
    with (
        Answers(path, IDENTITY) as out,
        pytest.raises(ConfigError, match=r"out\.jsonl\.p1 belongs to a run with slot_si"),
    ):
        out.gather(part)


def test_a_finished_file_that_was_moved_with_its_journal(path, tmp_path):
    write(path)
    finish(path)
    moved = tmp_path / "moved.jsonl"
    shutil.move(path, moved)
    shutil.move(answers.journal_path(path), answers.journal_path(moved))
    check_whole(moved)
