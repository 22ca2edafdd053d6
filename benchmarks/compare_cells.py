"""The cells of a large table: each is computed once, in a directory of its own, and kept for the next start.

`WORKDIR/KIND/NAME` holds

    cell.json      the cell's key, written before anything is computed, and the seconds it has taken so far
    result.json    what was computed; there as a whole, or not at all
    cell.lock      locked by the process that computes it

and what the computation itself leaves there. A key is the cell's settings, the commit that last changed a file it
depends on, and the keys of the cells whose results it uses. Several processes of a machine may share a work directory.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks import common
from refusion_jax.config import ConfigError
from refusion_jax.files import write_json

CELL_NAME, RESULT_NAME, LOCK_NAME = "cell.json", "result.json", "cell.lock"
_POLL_SECONDS = 2.0

# Of the package only what decides a result: values of settings are in the key, whatever module declares them.
_MODEL = ("refusion_jax/modeling",)
_TRAINING = tuple(
    f"refusion_jax/training/{name}.py" for name in ("evaluation", "loop", "optimizer", "state", "step", "weights")
)
_STUDY = (
    *_MODEL,
    "refusion_jax/decoding",
    "refusion_jax/methods.py",
    "refusion_jax/data",
    "refusion_jax/api.py",
    "refusion_jax/prompts.py",
)
_DECODING = (*_STUDY, "benchmarks/compare_decoding.py", "benchmarks/compare_loads.py")
PATHS = {
    "train": (
        *_MODEL, "refusion_jax/data", *_TRAINING, "refusion_jax/objectives.py", "refusion_jax/slots.py",
        "refusion_jax/views.py",
    ),
    "decode": _DECODING,
    "timing": _DECODING,
    "dependence": (*_MODEL, "refusion_jax/data", "benchmarks/compare_dependence.py"),
    "mechanisms": (*_STUDY, "benchmarks/compare_mechanisms.py", "benchmarks/compare_repairs.py"),
}  # fmt: skip


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines --workdir, --allow_dirty, --recompute and --list."""
    flags.DEFINE_string("workdir", "runs/compare", "Where the cells are.", flag_values=flag_values)
    flags.DEFINE_boolean("allow_dirty", False, "Compute with changes that are not committed.", flag_values=flag_values)
    flags.DEFINE_boolean("recompute", False, "Compute cells of other commits anew.", flag_values=flag_values)
    flags.DEFINE_boolean("list", False, "Only tell the state of all cells.", flag_values=flag_values)


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One computation.

    Attributes:
      kind, name: where it is, and what it is called in messages.
      settings: all that decides its result but the code; JSON types.
      compute: returns the result, of JSON types. It gets the cell's directory, in which it may find what an interrupted
        computation of the same key left; one that ends without a result must raise.
      after: the cells whose results it uses; they are finished when it begins.
    """

    kind: str
    name: str
    settings: Mapping[str, Any]
    compute: Callable[[Path], Any]
    after: tuple["Cell", ...] = ()

    @property
    def place(self) -> str:
        """`KIND/NAME`."""
        return f"{self.kind}/{self.name}"


class CellIsBusy(Exception):
    """Another process computes it."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The code that a kind of cells depends on: its commit, and which of its files differ from that."""

    commit: str
    changed: tuple[str, ...] = ()


class Cells:
    """The cells of a work directory.

    Args:
      workdir: made when needed.
      paths: for each kind of cells, the files and directories of the checkout that its results depend on.
      allow_dirty: compute with changes that are not committed. They are part of the key.
      recompute: compute cells anew whose code has changed since.
      root: the checkout.

    Raises:
      ConfigError: when there is no checkout, or no commit of the paths.
    """

    def __init__(
        self,
        workdir: Path,
        paths: Mapping[str, Sequence[str]] = PATHS,
        *,
        allow_dirty: bool = False,
        recompute: bool = False,
        root: Path = common.HERE.parent,
    ):
        self._workdir, self._allow_dirty, self._recompute = Path(workdir), allow_dirty, recompute
        # At once: the checkout may move on while this process computes with the code it has loaded.
        self._sources = {kind: read_source(root, each) for kind, each in paths.items()}

    @property
    def commits(self) -> dict[str, str]:
        """By kind of cells, the commit that last changed what they depend on."""
        return {kind: source.commit for kind, source in self._sources.items()}

    def directory(self, cell: Cell) -> Path:
        """Where a cell is."""
        return self._workdir / cell.kind / cell.name

    def run(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Computes what is not finished, in order; what another process computes comes later, or from there.

        Args:
          cells: with those that they come after.

        Returns:
          the result of each cell by its place.

        Raises:
          ConfigError: before anything is computed, for a cell that was computed or begun with another key, files that
            are not committed, or a cell that comes after one that is not in `cells`.
        """
        self._check(cells)
        results: dict[str, Any] = {}
        waiting = list(cells)
        while waiting:
            for cell in waiting:
                if all(each.place in results for each in cell.after):
                    with contextlib.suppress(CellIsBusy):
                        results[cell.place] = self.run_cell(cell)
            left = [cell for cell in waiting if cell.place not in results]
            if len(left) == len(waiting):
                time.sleep(_POLL_SECONDS)
            waiting = left
        return results

    def run_cell(self, cell: Cell) -> Any:
        """The result of a cell, computed unless it is finished.

        Raises:
          ConfigError: when it was computed or begun with another key.
          CellIsBusy: while another process computes it.
        """
        directory = self.directory(cell)
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            self._refuse(cell)
            if self._other_code(cell):
                _clear(directory)
            if self._other_code(cell) or not (directory / CELL_NAME).exists():
                write_json(directory / CELL_NAME, {"key": self._key(cell), "seconds": 0.0})
            if not (directory / RESULT_NAME).exists():
                with _timed(directory / CELL_NAME):
                    write_json(directory / RESULT_NAME, cell.compute(directory))
            return json.loads((directory / RESULT_NAME).read_text())

    def result(self, cell: Cell) -> Any | None:
        """The result of a cell that is finished, None of one that is not, or of other settings or code."""
        return json.loads((self.directory(cell) / RESULT_NAME).read_text()) if self.state(cell) == "finished" else None

    def table(self, cells: Sequence[Cell]) -> str:
        """A Markdown table of the cells' states and the seconds they took."""
        taken = {place: f"{seconds:,.0f}" for place, seconds in self.seconds(cells).items()}
        rows = [(cell.place, self.state(cell), taken.get(cell.place, "–")) for cell in cells]
        return common.table(["cell", "state", "seconds"], rows)

    def seconds(self, cells: Sequence[Cell]) -> dict[str, float]:
        """By place, how long each cell took that was begun, with whatever else the machine did."""
        saved = {cell.place: self._saved(cell) for cell in cells}
        return {place: found["seconds"] for place, found in saved.items() if "seconds" in found}

    def state(self, cell: Cell) -> str:
        """ "finished", "computing", "interrupted" or "missing", and "of other settings" or "of other code" if it is."""
        directory = self.directory(cell)
        if not (directory / CELL_NAME).exists():
            return "missing"
        state = "finished" if (directory / RESULT_NAME).exists() else "interrupted"
        if state == "interrupted":
            try:
                with _locked(directory):
                    pass
            except CellIsBusy:
                state = "computing"
        if self._other_settings(cell):
            return f"{state}, of other settings"
        return f"{state}, of other code" if self._other_code(cell) else state

    def _check(self, cells: Sequence[Cell]) -> None:
        places = {cell.place for cell in cells}
        if len(places) < len(cells):
            raise ValueError("Two cells have one place.")
        for cell in cells:
            changed = self._sources[cell.kind].changed
            if changed and not self._allow_dirty:
                raise ConfigError(
                    f"{changed[0]}, on which {cell.place} depends, has changes that are not committed, so it could not "
                    "be told what computed it: commit them, or give --allow_dirty."
                )
            missing = [each.place for each in cell.after if each.place not in places]
            if missing:
                raise ConfigError(f"{cell.place} uses the result of {missing[0]}, which is not asked for; add it.")
            self._refuse(cell)

    def _key(self, cell: Cell) -> dict[str, Any]:
        key = {
            "settings": dict(cell.settings),
            "commit": self._sources[cell.kind].commit,
            "after": {each.place: _digest(self._key(each)) for each in cell.after},
        }
        return json.loads(json.dumps(key))

    def _saved(self, cell: Cell) -> dict[str, Any]:
        path = self.directory(cell) / CELL_NAME
        return json.loads(path.read_text()) if path.exists() else {"key": self._key(cell)}

    def _other_settings(self, cell: Cell) -> str:
        """What setting is another one, "" if none is."""
        return first_difference(self._saved(cell)["key"]["settings"], self._key(cell)["settings"])

    def _other_code(self, cell: Cell) -> str:
        """What else of the key is another one, "" if nothing is."""
        saved, wanted = self._saved(cell)["key"], self._key(cell)
        if saved["commit"] != wanted["commit"]:
            return f"commit {saved['commit']} there and {wanted['commit']} here"
        used = first_difference(saved["after"], wanted["after"])
        return f"another result that it used: {used}" if used else ""

    def _refuse(self, cell: Cell) -> None:
        directory = self.directory(cell)
        strangers = set() if (directory / CELL_NAME).exists() else {path.name for path in directory.glob("*")}
        if strangers - {LOCK_NAME}:
            raise ConfigError(f"{directory} has files but no {CELL_NAME}: choose another --workdir, or delete it.")
        if difference := self._other_settings(cell):
            raise ConfigError(
                f"{directory} is of other settings ({difference}): choose another --workdir, or delete the directory."
            )
        if (difference := self._other_code(cell)) and not self._recompute:
            raise ConfigError(
                f"{directory} is of other code ({difference}): choose another --workdir, or give --recompute, which "
                "computes it anew."
            )


def read_source(root: Path, paths: Sequence[str]) -> Source:
    """The commit that last changed any of the paths of a checkout, and what has changed in them since.

    With changes the commit's name goes on with a hash of them.

    Raises:
      ConfigError: when `root` is no checkout, or no commit has the paths.
    """

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(root), *arguments, "--", *paths]
        try:
            return subprocess.run(command, capture_output=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", b"").decode().strip() or error
            raise ConfigError(
                f"{root} must be a git checkout, whose commits results are known by ({reason})."
            ) from None

    commit = git("log", "-1", "--format=%H").decode().strip()
    if not commit:
        raise ConfigError(f"No commit of {root} has {' or '.join(paths)}; name files that are there.")
    changed = git("diff", "HEAD", "--name-only", "-z").decode().split("\0")[:-1]
    added = git("ls-files", "--others", "--exclude-standard", "--full-name", "-z").decode().split("\0")[:-1]
    if not changed and not added:
        return Source(commit)
    digest = hashlib.sha256(git("diff", "HEAD", "--binary"))
    for name in added:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes())
    return Source(f"{commit}-dirty-{digest.hexdigest()[:12]}", tuple(sorted([*changed, *added])))


def first_difference(saved: Any, wanted: Any, name: str = "") -> str:
    """Says of the first setting that is not the same what it is in two JSON values; "" when they are equal."""
    if isinstance(saved, dict) and isinstance(wanted, dict):
        fields = sorted(saved.keys() | wanted.keys())
        found = (
            first_difference(saved.get(field), wanted.get(field), f"{name}.{field}" if name else field)
            for field in fields
        )
        return next(filter(None, found), "")
    return "" if saved == wanted else f"{name} is {json.dumps(saved)} there and {json.dumps(wanted)} here"


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps other processes out of a cell; ends with the process, however that ends."""
    with (directory / LOCK_NAME).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CellIsBusy(directory) from None
        except OSError:  # a file system without locks
            pass
        yield


@contextlib.contextmanager
def _timed(path: Path) -> Iterator[None]:
    """Adds the seconds that the block takes to those of a cell.json, also when it raises."""
    began = time.perf_counter()
    try:
        yield
    finally:
        saved = json.loads(path.read_text())
        write_json(path, saved | {"seconds": saved["seconds"] + time.perf_counter() - began})


def _clear(directory: Path) -> None:
    """Removes what a cell left, first the result and last the key: one cut short is still known to be another's."""
    (directory / RESULT_NAME).unlink(missing_ok=True)
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (CELL_NAME, LOCK_NAME):
            path.unlink()
