"""Little Sudokus with one solution each, drawn without end and without a file.

| task | grid, boxes                       | clues    | prompt                                        |
| ---- | --------------------------------- | -------- | --------------------------------------------- |
| 4    | 4 x 4, of 2 rows and 2 columns    | 5 to 9   | `4:1..3/..../.2../...4?`, a dot for a blank   |
| 6    | 6 x 6, of 2 rows and 3 columns    | 14 to 30 | the same, with digits to 6                    |

The response is the filled grid's rows joined by `/`, and `.`; the number of clues is uniform. A puzzle is one of a few
hundred with the fewest clues, made once, plus clues of its solution, under a random symmetry: digits renamed, bands,
stacks, rows of a band and columns of a stack swapped, rows made columns where boxes are square. None of it changes that
there is one solution.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence

from refusion_jax.data.examples import DataError
from refusion_jax.data.hashed_draws import HashedDraws

_POOL = 256  # puzzles with the fewest clues, of each task


@dataclasses.dataclass(frozen=True)
class Sudoku:
    """A kind of Sudoku: `size` rows, columns and digits, rows and columns of a box, and how many clues there may be.

    A grid is `size**2` digits, row by row, 0 for a blank.
    """

    size: int
    box_rows: int
    box_columns: int
    fewest_clues: int
    most_clues: int

    @functools.cached_property
    def units(self) -> list[tuple[int, int, int]]:
        """The row, the column and the box of each cell, numbered through."""
        across = self.size // self.box_columns
        return [
            (row, self.size + column, 2 * self.size + row // self.box_rows * across + column // self.box_columns)
            for row in range(self.size)
            for column in range(self.size)
        ]


SUDOKUS = {"4": Sudoku(4, 2, 2, 5, 9), "6": Sudoku(6, 2, 3, 14, 30)}


def solutions(sudoku: Sudoku, grid: Sequence[int], most: int) -> list[list[int]]:
    """The first solutions of a grid, at most so many."""
    free = [2 ** (sudoku.size + 1) - 2] * (3 * sudoku.size)  # bit d of a unit: digit d is not in it yet
    for digit, units in zip(grid, sudoku.units, strict=True):
        for unit in units if digit else ():
            if not free[unit] >> digit & 1:
                return []
            free[unit] -= 1 << digit
    blanks = {cell: sudoku.units[cell] for cell, digit in enumerate(grid) if not digit}
    found: list[list[int]] = []
    _search(list(grid), blanks, free, found, most)
    return found


def _search(
    grid: list[int], blanks: dict[int, tuple[int, int, int]], free: list[int], found: list[list[int]], most: int
) -> None:
    """Adds to `found` what completes the grid, filling first the blank with the fewest candidates."""
    if not blanks:
        found.append(list(grid))
        return
    fewest, cell, digits = 99, 0, 0
    for blank, (row, column, box) in blanks.items():
        candidates = free[row] & free[column] & free[box]
        count = candidates.bit_count()
        if count < fewest:
            fewest, cell, digits = count, blank, candidates
            if count < 2:
                break
    row, column, box = blanks.pop(cell)
    while digits and len(found) < most:
        bit = digits & -digits
        digits -= bit
        grid[cell] = bit.bit_length() - 1
        for unit in (row, column, box):
            free[unit] -= bit
        _search(grid, blanks, free, found, most)
        for unit in (row, column, box):
            free[unit] += bit
    blanks[cell] = row, column, box


def draw_prompt(task: str, draws: HashedDraws) -> str:
    """A prompt of task "4" or "6"."""
    sudoku, pool = SUDOKUS[task], _pool(task)
    solution, core = pool[draws.between(0, len(pool) - 1)]
    more = draws.between(sudoku.fewest_clues, sudoku.most_clues) - len(core)
    clues = {*core, *draws.sample([cell for cell in range(len(solution)) if cell not in core], more)}
    names = [0, *draws.sample(range(1, sudoku.size + 1), sudoku.size)]
    rows = _shuffled_lines(sudoku.size, sudoku.box_rows, draws)
    columns = _shuffled_lines(sudoku.size, sudoku.box_columns, draws)
    cells = [[row * sudoku.size + column for column in columns] for row in rows]
    if sudoku.box_rows == sudoku.box_columns and draws.between(0, 1):
        cells = [list(column) for column in zip(*cells, strict=True)]
    text = "/".join(["".join([str(names[solution[c]]) if c in clues else "." for c in row]) for row in cells])
    return f"{task}:{text}?"


def _shuffled_lines(size: int, height: int, draws: HashedDraws) -> list[int]:
    """The rows in random order, those of a band together; or columns, of a stack."""
    bands = draws.sample(range(0, size, height), size // height)
    return [line for band in bands for line in draws.sample(range(band, band + height), height)]


@functools.cache
def _pool(task: str) -> list[tuple[list[int], frozenset[int]]]:
    """Solutions, and which cells of each are clues enough: at most the fewest that a puzzle of the task has."""
    sudoku = SUDOKUS[task]
    pool: list[tuple[list[int], frozenset[int]]] = []
    attempt = 0
    while len(pool) < _POOL:
        solution = _filled(sudoku, f"sudoku {task} {attempt}")
        grid = list(solution)
        for cell in HashedDraws(f"sudoku {task} {attempt} order").sample(range(len(grid)), len(grid)):
            if sum(map(bool, grid)) <= sudoku.fewest_clues:
                break
            grid[cell] = 0
            if len(solutions(sudoku, grid, 2)) > 1:
                grid[cell] = solution[cell]
        clues = frozenset(cell for cell, digit in enumerate(grid) if digit)
        if len(clues) <= sudoku.fewest_clues:
            pool.append((solution, clues))
        attempt += 1
    return pool


def _filled(sudoku: Sudoku, key: str) -> list[int]:
    """A random filled grid: cell by cell, a random digit with which it can still be filled."""
    grid = [0] * sudoku.size**2
    for cell in range(len(grid)):
        for digit in HashedDraws(f"{key} {cell}").sample(range(1, sudoku.size + 1), sudoku.size):
            grid[cell] = digit
            if solutions(sudoku, grid, 1):
                break
    return grid


def solve(prompt: str) -> str:
    """The response to a prompt of task "4" or "6".

    Raises:
      DataError: when it is not a grid of the task, or does not have exactly one solution.
    """
    sudoku, size = SUDOKUS[prompt[0]], SUDOKUS[prompt[0]].size
    if not re.fullmatch(rf"{size}:(?:[1-{size}.]{{{size}}}/){{{size - 1}}}[1-{size}.]{{{size}}}\?", prompt):
        raise DataError(
            f"{prompt!r} is not a prompt of the synthetic tasks: a Sudoku has {size} rows of {size} digits to {size} "
            "or dots, joined by '/'."
        )
    grid = [int(char.replace(".", "0")) for char in prompt[2:-1] if char != "/"]
    found = solutions(sudoku, grid, 2)
    if len(found) != 1:
        raise DataError(
            f"{prompt!r} has {'more than one solution' if found else 'no solution'}; give clues that leave exactly one."
        )
    digits = "".join(map(str, found[0]))
    return "/".join(digits[start : start + size] for start in range(0, size * size, size)) + "."
