"""Files replaced whole, lines read in bounded memory, and fingerprints."""

import hashlib
import io
import os

import pytest

from refusion_jax.files import fingerprint, read_lines, replace_file


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replace_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_raises_changes_nothing(error, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(error), replace_file(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_rename_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"), replace_file(tmp_path / "file") as file:
        file.write(b"new")
    assert os.listdir(tmp_path) == []


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to("target")
    with replace_file(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_lines_beyond_the_limit_are_skipped_alone(end):
    content = b"\n".join([b"a", b"", b"12345", b"123456", b"b" * 30, b"c\r", b"123456"]) + end
    digest = hashlib.sha256()
    lines = list(read_lines(io.BytesIO(content), 5, digest))
    last = (7, None)
    assert lines == [(1, b"a\n"), (2, b"\n"), (3, b"12345\n"), (4, None), (5, None), (6, b"c\r\n"), last]
    assert digest.hexdigest() == hashlib.sha256(content).hexdigest()


def test_no_more_of_a_long_line_is_read_than_the_limit():
    class File(io.BytesIO):
        def readline(self, size=-1):
            assert 0 < size <= 6
            return super().readline(size)

    assert list(read_lines(File(b"x" * 1000 + b"\ny"), 5)) == [(1, None), (2, b"y")]
    assert list(read_lines(File(b""), 5)) == []


def test_fingerprints_tell_names_sizes_and_contents_apart(tmp_path):
    def of(**files):
        root = tmp_path / str(len(os.listdir(tmp_path)))
        root.mkdir()
        for name, content in files.items():
            (root / name).write_bytes(content)
        return fingerprint(root.iterdir(), root)

    large = bytes(range(256)) * 8192
    trained = bytes((byte + 1) % 256 for byte in large)
    assert of(a=b"1", b=b"2") == of(b=b"2", a=b"1")
    assert of(a=large) == of(a=large)
    prints = [of(a=b"1", b=b"2"), of(a=b"12"), of(a=b"1", c=b"2"), of(a=b"1", b=b"3"), of(a=large), of(a=trained), of()]
    assert len(set(prints)) == len(prints)
