"""What every tokenizer can do, whatever library it is of."""

import abc
import codecs
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from refusion_jax.data.chat import render_chatml
from refusion_jax.data.examples import DataError
from refusion_jax.files import replace_file

MODEL_NAME = "tokenizer.model"
JSON_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
# Of a character's UTF-8 bytes so many may be missing.
_MAX_CUT = 3


class Tokenizer(abc.ABC):
    """Text to token IDs and back.

    Attributes:
      vocab_size: the largest token ID + 1, added tokens included.
      unk_token_id: what characters outside the vocabulary become; -1 where there is no such token.
      pad_token_id: fills rows; may be the EOS token.
      eos_token_ids: all tokens that end a response.
      bos_token_id: begins a text; None where there is no such token.
      mask_token_id: stands for tokens that are not decoded yet.
      chat_template: the Jinja template of conversations; "" for ChatML.
      files: name -> content of the files that `save` writes.
    """

    vocab_size: int
    unk_token_id: int
    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    mask_token_id: int
    chat_template: str
    files: Mapping[str, bytes]

    @property
    def eos_token_id(self) -> int:
        """The token that ends a response of the training data; the first of `eos_token_ids`."""
        return self.eos_token_ids[0]

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides how texts and conversations are encoded."""
        digest = hashlib.sha256()
        for name, content in sorted(self.files.items()):
            digest.update(f"{name}\n{len(content)}\n".encode() + content)
        return digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Returns the token IDs of a text, to which nothing is added.

        Raises:
          UnicodeEncodeError: for a text with half a surrogate pair, which is no Unicode text.
        """
        return self.encode_batch([text])[0]

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns `encode(text)` for each text, faster than one by one."""

    @abc.abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of token IDs, skipping special tokens. Bytes that are not UTF-8 become U+FFFD.

        Raises:
          DataError: for a token ID outside the vocabulary.
        """

    @abc.abstractmethod
    def decode_whole(self, tokens: Iterable[int], *, at_start: bool = False) -> str:
        """Returns `decode(tokens)` without the characters that the ends of `tokens` cut.

        A character may have several tokens, each with some of its bytes. What more tokens could complete is left out;
        what they could not stays, as U+FFFD. So with `at_start` the text of some tokens is a prefix of the text of the
        same and more.

        Args:
          tokens: token IDs in a row.
          at_start: whether the text starts with these tokens, so that none before them holds part of a character.

        Raises:
          DataError: for a token ID outside the vocabulary.
        """

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, enable_thinking: bool
    ) -> str:
        """Returns a conversation as text, in the form of the chat template or, without one, ChatML.

        Args:
          messages: turns that `check_messages` has returned.
          add_generation_prompt: whether the text ends with the beginning of an assistant's turn.
          enable_thinking: what the template is told; whether the assistant may think before it answers.

        Raises:
          DataError: when the template refuses the conversation, or fails.
        """
        return render_chatml(messages, add_generation_prompt=add_generation_prompt)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes `files` into a directory, on disk or `gs://`, making it; each file appears only when complete."""
        _write_files(directory, self.files)

    def export(self, directory: str | os.PathLike[str]) -> None:
        """Like `save`, with what programs built on `transformers` need besides."""
        _write_files(directory, {**self.files, **self.foreign_files()})

    def foreign_files(self) -> Mapping[str, bytes]:
        """What `export` writes besides `files`."""
        return {}

    def _checked(self, tokens: Iterable[int]) -> list[int]:
        """The token IDs as a list."""
        checked = [int(token) for token in tokens]
        for token in checked:
            if not 0 <= token < self.vocab_size:
                raise DataError(f"Token ID {token} is outside the tokenizer's vocabulary of {self.vocab_size} tokens.")
        return checked


def _write_files(directory: str | os.PathLike[str], files: Mapping[str, bytes]) -> None:
    target = epath.Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with replace_file(target / name) as file:
            file.write(content)


def decode_bytes(content: bytes, at_start: bool) -> str:
    """Returns the text of UTF-8 bytes without the characters that their ends cut; see `Tokenizer.decode_whole`."""
    return codecs.utf_8_decode(content[0 if at_start else _cut_start(content) :], "replace", False)[0]


def without_cut_bytes(tokens: list[int], byte_of: Callable[[int], int | None], at_start: bool) -> list[int]:
    """Leaves out the tokens at the ends that are bytes of a character of which others are missing.

    Args:
      tokens: token IDs in a row.
      byte_of: the byte of a token that stands for a single one, None for any other.
      at_start: see `Tokenizer.decode_whole`.
    """
    start = 0 if at_start else _cut_start(_bytes(tokens[:_MAX_CUT], byte_of))
    kept = tokens[start:]
    last = _bytes(kept[: -_MAX_CUT - 1 : -1], byte_of)[::-1]
    return kept[: len(kept) - len(last) + codecs.utf_8_decode(last, "replace", False)[1]]


def _bytes(tokens: list[int], byte_of: Callable[[int], int | None]) -> bytes:
    """The bytes of the first tokens, up to one that is none."""
    found = []
    for token in tokens:
        byte = byte_of(token)
        if byte is None:
            break
        found.append(byte)
    return bytes(found)


def _cut_start(content: bytes) -> int:
    """How many bytes at the start continue a character whose first byte is missing."""
    count = 0
    while count < min(_MAX_CUT, len(content)) and content[count] & 0xC0 == 0x80:
        count += 1
    return count
