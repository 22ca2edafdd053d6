"""Cells that are computed once, in a checkout made for the test."""

import fcntl
import json
import shutil
import subprocess

import pytest

from benchmarks import common, compare_cells
from benchmarks.compare_cells import Cell, Cells
from refusion_jax.config import ConfigError


def git(root, *arguments):
    identity = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def change(root, name, text, *, commit=True):
    (root / name).write_text(text)
    if commit:
        git(root, "add", name)
        git(root, "commit", "-m", name)


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkout"
    root.mkdir()
    git(root, "init")
    change(root, "train.py", "1")
    change(root, "decode.py", "1")
    return root


@pytest.fixture
def open_cells(checkout, tmp_path):
    paths = {"train": ["train.py"], "decode": ["decode.py"]}
    return lambda **options: Cells(tmp_path / "work", paths, root=checkout, **options)


class Count:
    """A computation that says how often it was done, here and before in its directory."""

    def __init__(self):
        self.times = 0

    def __call__(self, directory):
        self.times += 1
        with (directory / "steps").open("a") as file:
            file.write("x")
        return {"times": self.times, "steps": len((directory / "steps").read_text())}


def make_cells(train, decode, **settings):
    trained = Cell("train", "refusion", {"steps": 3, "model": {"width": (1, 2)}} | settings, train)
    return [trained, Cell("decode", "refusion", {"threshold": 0.9}, decode, after=(trained,))]


def test_finished_cells_are_not_computed_again(open_cells, checkout, tmp_path):
    train, decode = Count(), Count()
    first = open_cells().run(make_cells(train, decode))
    assert first == {place: {"times": 1, "steps": 1} for place in ("train/refusion", "decode/refusion")}
    assert json.loads((tmp_path / "work/train/refusion/result.json").read_text()) == first["train/refusion"]
    change(checkout, "other.py", "1")  # nothing depends on it
    assert open_cells().run(make_cells(train, decode)) == first and train.times == decode.times == 1


def test_other_settings_are_refused_before_anything_is_computed(open_cells, tmp_path):
    open_cells().run(make_cells(Count(), Count()))
    new = Cell("train", "llada", {}, Count())
    message = r"work/train/refusion is of other settings \(model.width is \[1, 2\] there and \[3\] here\): choose anoth"
    for recompute in (False, True):
        with pytest.raises(ConfigError, match=message):
            open_cells(recompute=recompute).run([new, *make_cells(Count(), Count(), model={"width": [3]})])
    assert new.compute.times == 0
    with pytest.raises(ConfigError, match=r"\(seed is null there and 1 here\)"):
        open_cells().run(make_cells(Count(), Count(), seed=1))
    shutil.rmtree(tmp_path / "work/train/refusion")
    with pytest.raises(ConfigError, match=r"decode/refusion is of other code .another result that it used: train/r"):
        open_cells().run(make_cells(Count(), Count(), seed=1))


def test_other_code_is_computed_anew_when_asked(open_cells, checkout):
    train, decode = Count(), Count()
    cells = make_cells(train, decode)
    open_cells().run(cells)
    change(checkout, "decode.py", "2")
    with pytest.raises(ConfigError, match=r"decode/refusion is of other code \(commit \w{40} there .* --recompute"):
        open_cells().run(cells)
    assert open_cells(recompute=True).run(cells)["decode/refusion"] == {"times": 2, "steps": 1}
    assert train.times == 1
    change(checkout, "train.py", "2")
    assert open_cells(recompute=True).run(cells)["train/refusion"] == {"times": 2, "steps": 1}
    assert decode.times == 3  # of the model that was trained anew
    assert open_cells().run(cells)["decode/refusion"]["times"] == 3


def test_changes_that_are_not_committed_are_refused_or_part_of_the_key(open_cells, checkout):
    cells = make_cells(Count(), Count())
    change(checkout, "train.py", "3", commit=False)
    with pytest.raises(ConfigError, match=r"train.py, on which train/refusion depends, has changes that are not commi"):
        open_cells().run(cells)
    open_cells(allow_dirty=True).run(cells)
    open_cells(allow_dirty=True).run(cells)
    assert cells[0].compute.times == 1
    change(checkout, "train.py", "4", commit=False)
    with pytest.raises(ConfigError, match=r"other code \(commit \w{40}-dirty-\w{12} there"):
        open_cells(allow_dirty=True).run(cells)


def test_files_that_were_added_are_changes(checkout):
    before = compare_cells.read_source(checkout, ["."])
    change(checkout, "new.py", "1", commit=False)
    added = compare_cells.read_source(checkout, ["."])
    change(checkout, "new.py", "2", commit=False)
    other = compare_cells.read_source(checkout, ["."])
    assert before.changed == () and added.changed == other.changed == ("new.py",)
    assert len({before.commit, added.commit, other.commit}) == 3
    with pytest.raises(ConfigError, match=r"No commit of .* has nothing.py; name files that are there"):
        compare_cells.read_source(checkout, ["nothing.py"])
    with pytest.raises(ConfigError, match="must be a git checkout"):
        compare_cells.read_source(checkout / "none", ["."])


def test_the_paths_are_in_this_checkout():
    for paths in compare_cells.PATHS.values():
        assert all((common.HERE.parent / path).exists() for path in paths)


def test_an_interrupted_cell_goes_on_where_it_was(open_cells):
    count = Count()

    def interrupted(directory):
        count(directory)
        raise KeyboardInterrupt

    cells = make_cells(interrupted, Count())
    with pytest.raises(KeyboardInterrupt):
        open_cells().run(cells)
    assert open_cells().state(cells[0]) == "interrupted"
    with pytest.raises(ConfigError, match="of other settings"):
        open_cells().run(make_cells(count, Count(), steps=4))
    assert open_cells().run(make_cells(count, Count()))["train/refusion"] == {"times": 2, "steps": 2}


def test_a_cell_that_another_process_computes_comes_later(open_cells, monkeypatch):
    """The other's computation ends while this one has nothing else to do."""
    order = []
    trained, decoded = make_cells(lambda _: order.append("train"), lambda _: order.append("decode"))
    other = Cell("train", "llada", {}, lambda _: order.append("llada"))
    cells = open_cells()
    cells.directory(trained).mkdir(parents=True)
    lock = (cells.directory(trained) / compare_cells.LOCK_NAME).open("ab")
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr(compare_cells.time, "sleep", lambda seconds: (order.append("waited"), lock.close()))
    cells.run([trained, decoded, other])
    assert order == ["llada", "waited", "train", "decode"]


def test_an_error_of_a_computation_is_not_taken_for_another_process(open_cells):
    def blocked(_):
        raise BlockingIOError("a full pipe")

    with pytest.raises(BlockingIOError, match="a full pipe"):
        open_cells().run([Cell("train", "refusion", {}, blocked)])


def test_states_of_cells(open_cells, checkout):
    cells = make_cells(Count(), Count())
    one = Cell("train", "one", {}, Count())
    running = Cell("train", "running", {}, lambda _: states.append(open_cells().state(running)))
    states = []
    assert open_cells().table([one]).splitlines()[2:] == ["| train/one | missing | – |"]
    open_cells().run([*cells, running])
    assert states == ["computing"]
    assert open_cells().seconds([*cells, one]).keys() == {"train/refusion", "decode/refusion"}
    assert open_cells().table([*cells, one]).splitlines()[2:] == [
        "| train/refusion | finished | 0 |", "| decode/refusion | finished | 0 |", "| train/one | missing | – |",
    ]  # fmt: skip
    assert open_cells().result(cells[1]) == {"times": 1, "steps": 1} and open_cells().result(one) is None
    change(checkout, "decode.py", "2")
    assert open_cells().state(cells[1]) == "finished, of other code" and open_cells().result(cells[1]) is None
    assert open_cells().state(make_cells(Count(), Count(), steps=5)[0]) == "finished, of other settings"


def test_refuses_cells_without_what_they_use_and_directories_of_others(open_cells, tmp_path):
    trained, decoded = make_cells(Count(), Count())
    with pytest.raises(ConfigError, match="decode/refusion uses the result of train/refusion, which is not asked for"):
        open_cells().run([decoded])
    mine = tmp_path / "work/train/refusion/mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(ConfigError, match=r"train/refusion has files but no cell.json"):
        open_cells(recompute=True).run([trained])
    assert mine.read_text() == "mine"


def test_kinds_of_cells_tell_their_commits(open_cells):
    commits = open_cells().commits
    assert commits and all(len(commit) >= 40 for commit in commits.values())
