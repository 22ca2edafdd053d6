"""Little text tasks that a small model learns in minutes, generated without end and without a file.

| task   | prompt                                   | response                                                         |
| ------ | ---------------------------------------- | ---------------------------------------------------------------- |
| repeat | `R:` 4 to 23 letters a-j `?`             | the letters joined by `>`, `.`                                   |
| sum    | `S:` 3 to 8 digits 1-9 joined by `+` `?` | `total+digit=sum;` per digit, from total 0, then `A`, total, `.` |
| count  | `Q:n,m?`, n in 1..59, m in 6..15         | the m numbers from n joined by `,`, `.`                          |
| again  | `A:` 3 to 9 letters k-t `?`              | each letter four times, `=`, the letters reversed, `.`           |
| 4, 6   | a Sudoku of 4 x 4 or 6 x 6: see `sudoku` | the filled grid                                                  |

Lengths, letters, digits, n and m are uniform. A prompt belongs to training or is held out by a hash of itself, so
the two never share one. About an eighth of each task's prompts is held out, but a quarter of the counting ones: there
are only 590 of those, and 141 held out allow 566 held-out examples, all different.
"""

import functools
import zlib
from collections.abc import Callable, Container
from typing import Literal

from refusion_jax.data import sudoku
from refusion_jax.data.examples import DataError, Example
from refusion_jax.data.hashed_draws import HashedDraws

TASKS = "RSQA"  # of a dataset that does not say otherwise
HELD_OUT_SHARES = {"R": 1 / 8, "S": 1 / 8, "Q": 1 / 4, "A": 1 / 8, "4": 1 / 8, "6": 1 / 8}

_REPEAT_LETTERS = "abcdefghij"
_AGAIN_LETTERS = "klmnopqrst"


def _repeat_prompt(draws: HashedDraws) -> str:
    return f"R:{draws.letters(_REPEAT_LETTERS, draws.between(4, 23))}?"


def _sum_prompt(draws: HashedDraws) -> str:
    return f"S:{'+'.join(draws.letters('123456789', draws.between(3, 8)))}?"


def _count_prompt(draws: HashedDraws) -> str:
    return f"Q:{draws.between(1, 59)},{draws.between(6, 15)}?"


def _again_prompt(draws: HashedDraws) -> str:
    return f"A:{draws.letters(_AGAIN_LETTERS, draws.between(3, 9))}?"


_PROMPTS: dict[str, Callable[[HashedDraws], str]] = {
    "R": _repeat_prompt,
    "S": _sum_prompt,
    "Q": _count_prompt,
    "A": _again_prompt,
    **{task: functools.partial(sudoku.draw_prompt, task) for task in sudoku.SUDOKUS},
}


def task_of(prompt: str) -> str:
    """Returns the task's letter, of those in `HELD_OUT_SHARES`.

    Raises:
      DataError: when the prompt is of none of the tasks.
    """
    if len(prompt) < 4 or prompt[0] not in HELD_OUT_SHARES or prompt[1] != ":" or prompt[-1] != "?":
        raise DataError(f"{prompt!r} is not a prompt of the synthetic tasks, such as 'S:7+1+7+5?'.")
    return prompt[0]


def gold(prompt: str) -> str:
    """Returns the one right response to a prompt of the tasks.

    Raises:
      DataError: when the prompt is of none of the tasks, or a Sudoku without exactly one solution.
    """
    task, body = task_of(prompt), prompt[2:-1]
    if task in sudoku.SUDOKUS:
        return sudoku.solve(prompt)
    if task == "R":
        return ">".join(body) + "."
    if task == "A":
        return "".join([4 * letter for letter in body]) + f"={body[::-1]}."
    try:
        numbers = [int(number) for number in body.split("+" if task == "S" else ",")]
        if task == "Q":
            first, count = numbers
            return ",".join(map(str, range(first, first + count))) + "."
    except ValueError:
        raise DataError(f"{prompt!r} is not a prompt of the synthetic tasks, such as 'S:7+1+7+5?'.") from None
    total, steps = 0, []
    for number in numbers:
        steps.append(f"{total}+{number}={total + number};")
        total += number
    return "".join(steps) + f"A{total}."


def is_held_out(prompt: str) -> bool:
    """Whether the prompt belongs to the held-out split; decided by the prompt alone, whatever the seed."""
    # CRC-32 is linear in the prompt's bits; the remainder by a number that is not a power of two is not.
    return zlib.crc32(prompt.encode()) % 1000 < 1000 * HELD_OUT_SHARES[prompt[0]]


def _prompt(seed: int, split: Literal["train", "held_out"], index: int, taken: Container[str], tasks: str) -> str:
    """Draws prompt `index` of a split, trying again until it belongs to the split and is not in `taken`."""
    draw_prompt = _PROMPTS[tasks[index % len(tasks)]]
    attempt = 0
    while True:
        prompt = draw_prompt(HashedDraws(f"{seed} {split} {index} {attempt}"))
        if is_held_out(prompt) == (split == "held_out") and prompt not in taken:
            return prompt
        attempt += 1


def train_example(seed: int, index: int, tasks: str = TASKS) -> Example:
    """Returns training example `index`, of task `tasks[index % len(tasks)]`: a pure function of the arguments."""
    prompt = _prompt(seed, "train", index, (), tasks)
    return Example(prompt, gold(prompt))


def train_examples(seed: int, count: int, tasks: str = TASKS) -> list[Example]:
    """Returns the first `count` training examples of `seed`, the tasks in turn. Prompts may repeat."""
    return [train_example(seed, index, tasks) for index in range(count)]


def held_out_examples(seed: int, count: int, tasks: str = TASKS) -> list[Example]:
    """Returns the first `count` held-out examples of `seed`, the tasks in turn, every prompt a different one.

    A larger `count` only appends.

    Raises:
      DataError: when there are not that many different held-out prompts.
    """
    counting = sum(is_held_out(f"Q:{first},{number}?") for first in range(1, 60) for number in range(6, 16))
    most = counting * len(tasks) + tasks.find("Q")
    if "Q" in tasks and count > most:
        raise DataError(
            f"{count} held-out synthetic examples were asked for, but only {counting} different counting prompts are "
            f"held out, and one example in {len(tasks)} is of that task: ask for at most {most}."
        )
    prompts: dict[str, None] = {}
    for index in range(count):
        prompts[_prompt(seed, "held_out", index, prompts, tasks)] = None
    return [Example(prompt, gold(prompt)) for prompt in prompts]
