import collections
import itertools

import pytest

from refusion_jax.data import sudoku, synthetic
from refusion_jax.data.examples import DataError


def lines_of(task, response):
    """Rows, columns and boxes of a response's grid."""
    kind = sudoku.SUDOKUS[task]
    rows = response.rstrip(".").split("/")
    tops, lefts = range(0, kind.size, kind.box_rows), range(0, kind.size, kind.box_columns)
    boxes = [
        "".join(row[left : left + kind.box_columns] for row in rows[top : top + kind.box_rows])
        for top, left in itertools.product(tops, lefts)
    ]
    return [*rows, *map("".join, zip(*rows, strict=True)), *boxes]


def solutions_by_enumeration(clues):
    """All solutions of a 4 x 4 grid, one row after another from all permutations."""
    found = []
    for rows in itertools.product(*([p for p in itertools.permutations("1234") if fits(p, row)] for row in clues)):
        response = "/".join(map("".join, rows)) + "."
        if all(len(set(line)) == 4 for line in lines_of("4", response)):
            found.append(response)
    return found


def fits(digits, clues):
    return all(clue in (".", digit) for digit, clue in zip(digits, clues, strict=True))


def test_every_4x4_puzzle_has_one_solution_says_enumeration():
    for example in synthetic.train_examples(0, 100, "4"):
        assert solutions_by_enumeration(example.prompt[2:-1].split("/")) == [example.response]


@pytest.mark.parametrize("task", sudoku.SUDOKUS)
def test_puzzles_keep_their_clues_and_break_no_rule(task):
    kind = sudoku.SUDOKUS[task]
    digits = set("123456"[: kind.size])
    prompts = [example.prompt for example in synthetic.train_examples(1, 2_000, task)]
    for prompt in prompts:
        response = synthetic.gold(prompt)
        assert synthetic.task_of(prompt) == task
        assert all(set(line) == digits and len(line) == kind.size for line in lines_of(task, response))
        assert len(prompt) == len(response) + 2 and fits(response[:-1], prompt[2:-1])
    counts = collections.Counter(sum(map(str.isdigit, prompt[2:])) for prompt in prompts)
    choices = kind.most_clues - kind.fewest_clues + 1
    assert set(counts) == set(range(kind.fewest_clues, kind.most_clues + 1))
    assert all(0.75 < count * choices / len(prompts) < 1.25 for count in counts.values())
    assert len(set(prompts)) > 1_950
    for place in range(kind.size**2):  # no cell, and no digit, is favoured
        cells = collections.Counter(prompt[2:-1].replace("/", "")[place] for prompt in prompts)
        assert max(cells[digit] for digit in digits) < 1.5 * min(cells[digit] for digit in digits)


def test_prompts_are_written_down():
    """So that runs of the same seed stay comparable."""
    assert [example.prompt for example in synthetic.train_examples(0, 2, "46")] == [
        "4:.3../4.../3.12/.23.?",
        "6:136452/254613/41326./62..34/.62341/3..526?",
    ]


def test_the_solver_finds_every_solution_up_to_the_most_asked_for():
    empty, kind = [0] * 16, sudoku.SUDOKUS["4"]
    found = sudoku.solutions(kind, empty, 1_000)
    assert len(found) == len(set(map(tuple, found))) == 288  # all there are
    assert len(sudoku.solutions(kind, empty, 5)) == 5
    assert sudoku.solutions(kind, [1, 1, *empty[2:]], 5) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("4:..../..../..../....?", "has more than one solution"),
        ("4:12../..3./..../....?", "has no solution"),
        ("4:12../..15/..../....?", "is not a prompt of the synthetic tasks: a Sudoku has 4 rows of 4 digits to 4 or"),
        ("4:12../..../....?", "a Sudoku has 4 rows"),
        ("6:12../.3../..../...4?", "a Sudoku has 6 rows"),
    ],
)
def test_refuses_what_has_not_one_solution(prompt, message):
    with pytest.raises(DataError, match=message):
        synthetic.gold(prompt)
