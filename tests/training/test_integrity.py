"""Lists of files, and what is found when a file is not as listed."""

import json

import pytest
from etils import epath

from refusion_jax.training import integrity


@pytest.fixture
def checkpoints(tmp_path):
    """Three sealed checkpoints of two files, 5, 10 and 15."""
    directory = epath.Path(tmp_path) / "checkpoints"
    for step in (5, 10, 15):
        (directory / str(step) / "params" / "d").mkdir(parents=True)
        (directory / str(step) / "params" / "d" / "data").write_bytes(bytes(range(step)))
        (directory / str(step) / "_METADATA").write_text("{}")
    integrity.seal_all(directory)
    return directory


def test_every_file_is_listed_and_whole_ones_are_believed(checkpoints):
    listed = json.loads((checkpoints / "10" / "files.json").read_text())
    assert {name: size for name, (size, _) in listed.items()} == {"params/d/data": 10, "_METADATA": 2}
    assert integrity.finished_steps(checkpoints) == [5, 10, 15]
    assert not any(integrity.reported_damage(checkpoints, step) for step in (5, 10, 15))


def flip(path):
    content = bytearray(path.read_bytes())
    content[3] ^= 16
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "its file params/d/data has 14 bytes, not 15"),
        (lambda path: path.unlink(), "its file params/d/data is missing"),
        (flip, "its file params/d/data has changed"),
    ],
)
def test_damage_is_named_and_moved_away(harm, sentence, checkpoints, capsys):
    damaged = checkpoints.parent / "damaged"
    harm(checkpoints / "15" / "params" / "d" / "data")
    integrity.set_damaged_aside(checkpoints, damaged)
    assert capsys.readouterr().err == (
        f"Warning: Checkpoint 15 of {checkpoints} is damaged ({sentence}) and is passed over.\n"
    )
    assert integrity.finished_steps(checkpoints) == [5, 10]
    assert [path.name for path in damaged.iterdir()] == ["15"]


def test_only_the_newest_are_looked_at_and_names_do_not_clash(checkpoints, capsys):
    damaged = checkpoints.parent / "damaged"
    (damaged / "15").mkdir(parents=True)
    flip(checkpoints / "5" / "params" / "d" / "data")
    flip(checkpoints / "15" / "params" / "d" / "data")
    integrity.set_damaged_aside(checkpoints, damaged)
    assert integrity.finished_steps(checkpoints) == [5, 10]
    assert sorted(path.name for path in damaged.iterdir()) == ["15", "15-1"]


def test_a_list_that_cannot_be_read_is_damage_and_none_is_not(checkpoints, capsys):
    (checkpoints / "15" / "files.json").write_text("{")
    assert integrity.reported_damage(checkpoints, 15)
    (checkpoints / "15" / "files.json").write_text("{}")
    assert integrity.reported_damage(checkpoints, 15)
    assert "its file _METADATA is not listed" in capsys.readouterr().err
    (checkpoints / "15" / "files.json").unlink()
    assert not integrity.reported_damage(checkpoints, 15)
    assert integrity.finished_steps(checkpoints.parent / "nowhere") == []
