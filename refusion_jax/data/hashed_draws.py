"""Random draws that are the same for every Python and NumPy."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class HashedDraws:
    """Uniform draws from a hash of a key: a pure function of the key.

    A hash has 256 bits. Draws that take fewer than 90 of them together, as 23 decimal ones do, are uniform to better
    than 2**-160.
    """

    def __init__(self, key: str):
        self._bits = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=32).digest(), "little")

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        self._bits, draw = divmod(self._bits, high - low + 1)
        return low + draw

    def letters(self, alphabet: str, count: int) -> str:
        """So many letters, each of its own draw."""
        return "".join([alphabet[self.between(0, len(alphabet) - 1)] for _ in range(count)])

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """So many different ones of the items, in random order."""
        rest = list(items)
        return [rest.pop(self.between(0, len(rest) - 1)) for _ in range(count)]
