"""Text to token IDs and back with the `tokenizer.json` of a Hugging Face checkpoint, and its chat template."""

import functools
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from refusion_jax.data.chat import shorten
from refusion_jax.data.chat_template import render_template
from refusion_jax.data.examples import DataError
from refusion_jax.data.tokenizers import CONFIG_NAME, JSON_NAME, Tokenizer, decode_bytes, without_cut_bytes

TEMPLATE_NAME = "chat_template.jinja"
SPECIAL_NAME = "special_tokens_map.json"
GENERATION_NAME = "generation_config.json"
# All that is read of a directory, besides `tokenizer.json`.
OTHER_NAMES = (CONFIG_NAME, TEMPLATE_NAME, SPECIAL_NAME, GENERATION_NAME)

# ReFusion's own, added in this order to a tokenizer without a mask.
BEGIN_OF_TEXT, MASK = "<|beginoftext|>", "<|mask|>"
MASKS = (MASK, "<|mdm_mask|>", "<mask>", "[MASK]")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token")


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` with the files beside it.

    Encoding recognises special tokens that are written in the text, as chat templates write them, and adds none.

    The mask token is `mask_token_id`, else the `mask_token` of the configuration, else a special token of one of the
    names `MASKS`. Where there is none, `<|beginoftext|>` (unless there is a BOS token) and `<|mask|>` are added, also
    to `files`: to Qwen3's 151,669 tokens as 151669 and 151670, which they are in ReFusion's checkpoints.

    Args:
      files: name -> content of `tokenizer.json` and of those of `OTHER_NAMES` that there are.
      place: where they are, for messages.
      mask_token_id: the model's mask token, where its configuration names one. One beyond the vocabulary has no text.

    Raises:
      DataError: when a file is not what its name says, there is no EOS token, or `tokenizers` is not installed.
    """

    def __init__(self, files: Mapping[str, bytes], place: str = "the tokenizer", mask_token_id: int | None = None):
        self.files: dict[str, bytes] = dict(files)
        self._place = place
        definition = self._object(JSON_NAME)
        config = {name: value for name, value in self._object(CONFIG_NAME).items() if value is not None}
        self._config = self._object(SPECIAL_NAME) | config
        self._tokenizer = self._parse(self.files[JSON_NAME])
        self.mask_token_id = self._find_mask(definition, mask_token_id)
        self.vocab_size = self._count()
        self._special = {token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        self.unk_token_id = _unknown(definition, self._tokenizer)
        self.eos_token_ids = self._find_eos()
        pad, bos = self._named("pad_token"), self._named("bos_token")
        self.pad_token_id = self.eos_token_id if pad is None else pad
        self.bos_token_id = self._tokenizer.token_to_id(BEGIN_OF_TEXT) if bos is None else bos
        self.chat_template = self._find_template()
        self._decoder = _decoder_types(definition)
        self._spelling = functools.cache(self._spell)

    # ---- text and tokens ----

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            text.encode()
        return [row.ids for row in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        return self._decode(self._without_special(tokens))

    def decode_whole(self, tokens: Iterable[int], *, at_start: bool = False) -> str:
        kept = self._without_special(tokens)
        if self._decoder == ["ByteLevel"]:
            return decode_bytes(b"".join(map(self._spelling, kept)), at_start)
        if "ByteFallback" in self._decoder:
            kept = without_cut_bytes(kept, self._byte_of, at_start)
        return self._decode(kept)

    def _without_special(self, tokens: Iterable[int]) -> list[int]:
        return [token for token in self._checked(tokens) if token not in self._special]

    def _decode(self, tokens: list[int]) -> str:
        if "ByteFallback" in self._decoder:
            tokens = self._mended(tokens)
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def _mended(self, tokens: list[int]) -> list[int]:
        """Replaces bytes that are no UTF-8 by those of U+FFFD: they would spoil the characters beside them too."""
        mended: list[int] = []
        for is_byte, run in itertools.groupby(tokens, lambda token: self._byte_of(token) is not None):
            if is_byte:
                text = bytes(byte for token in run if (byte := self._byte_of(token)) is not None)
                names = (f"<0x{byte:02X}>" for byte in text.decode(errors="replace").encode())
                mended += [found for name in names if (found := self._tokenizer.token_to_id(name)) is not None]
            else:
                mended += run
        return mended

    def _spell(self, token: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary, which writes each as a character."""
        piece = self._tokenizer.id_to_token(token) or ""
        known = _byte_characters()
        if any(character not in known for character in piece):
            return piece.encode()
        return bytes(known[character] for character in piece)

    def _byte_of(self, token: int) -> int | None:
        piece = self._tokenizer.id_to_token(token) or ""
        is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
        return int(piece[3:5], 16) if is_byte else None

    # ---- conversations ----

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, enable_thinking: bool
    ) -> str:
        if not self.chat_template:
            return super().render(
                messages, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
            )
        tokens = {name: _content(self._config.get(name)) for name in _SPECIAL}
        variables = {name: token for name, token in tokens.items() if token is not None} | {
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "enable_thinking": enable_thinking,
        }
        name = TEMPLATE_NAME if TEMPLATE_NAME in self.files else CONFIG_NAME
        return render_template(self.chat_template, variables, f"{self._place}/{name}")

    def _find_template(self) -> str:
        if TEMPLATE_NAME in self.files:
            return self._text(TEMPLATE_NAME)
        template: Any = self._config.get("chat_template") or ""
        if isinstance(template, list):
            named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = named[0].get("template") if named else None
        if not isinstance(template, str):
            raise self._error(CONFIG_NAME, "chat_template must be a text, or a list with one named 'default'")
        return template

    # ---- files ----

    def _error(self, name: str, problem: str) -> DataError:
        return DataError(f"{self._place}/{name}: {problem}.")

    def _text(self, name: str) -> str:
        try:
            return self.files[name].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self._error(name, f"expected UTF-8 text, but the byte at offset {error.start} is not") from None

    def _object(self, name: str) -> dict[str, Any]:
        """The JSON object of a file; empty without the file."""
        if name not in self.files:
            return {}
        try:
            value = json.loads(self._text(name))
        except json.JSONDecodeError as error:
            raise self._error(name, f"expected JSON, but at line {error.lineno}: {error.msg}") from None
        except RecursionError:
            raise self._error(name, "expected JSON, but it is nested too deeply") from None
        except ValueError as error:  # a number of thousands of digits
            raise self._error(name, f"expected JSON, but {error}") from None
        if not isinstance(value, dict):
            raise self._error(name, f"expected a JSON object, but it is of type {type(value).__name__}")
        return value

    def _parse(self, content: bytes) -> Any:
        try:
            import tokenizers
        except ImportError:
            raise self._error(JSON_NAME, "reading it needs `tokenizers`; pip install refusion_jax[hf]") from None
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            reason = str(error).strip().split("\n")[0][:160]
            raise self._error(JSON_NAME, f"expected a tokenizer of the `tokenizers` library ({reason})") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if not tokenizer.get_vocab_size():
            raise self._error(JSON_NAME, "the tokenizer has no tokens")
        return tokenizer

    # ---- special tokens ----

    def _count(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def _named(self, name: str) -> int | None:
        """The ID of the token that the configuration names, None where it names none."""
        value = self._config.get(name)
        content = _content(value)
        if content is None:
            if value is not None:
                raise self._error(CONFIG_NAME, f"{name} must be a text or an object with the text as its content")
            return None
        token = self._tokenizer.token_to_id(content)
        if token is None:
            raise self._error(CONFIG_NAME, f"{name} is {shorten(content)}, which is no token of {JSON_NAME}")
        return token

    def _find_eos(self) -> tuple[int, ...]:
        """The tokenizer's EOS, then those of generation."""
        own = self._named("eos_token")
        others = self._object(GENERATION_NAME).get("eos_token_id")
        others = [] if others is None else others if isinstance(others, list) else [others]
        for token in others:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                problem = f"eos_token_id has {shorten(token)}, which is no token ID below {self.vocab_size}"
                raise self._error(GENERATION_NAME, problem)
        found = tuple(dict.fromkeys(others if own is None else [own, *others]))
        if not found:
            raise self._error(CONFIG_NAME, "there is no EOS token; name it as eos_token")
        return found

    def _find_mask(self, definition: dict[str, Any], given: int | None) -> int:
        """The mask token's ID; adds the token, or its name, to the files where they lack it."""
        found = self._named("mask_token")
        if found is None:
            added = self._tokenizer.get_added_tokens_decoder()
            special = {entry.content: token for token, entry in added.items() if entry.special}
            found = next((special[name] for name in MASKS if name in special), None)
        if found is not None and given in (None, found):
            return found
        if given is None or given >= self._count():
            names = [MASK] if self._named("bos_token") is not None else [BEGIN_OF_TEXT, MASK]
            missing = [name for name in names if self._tokenizer.token_to_id(name) is None]
            if given in (None, self._count() + len(missing) - 1):
                self._add(definition, missing)
                given = self._tokenizer.token_to_id(MASK)
        assert given is not None
        name = self._tokenizer.id_to_token(given)
        if name is not None:
            self._config["mask_token"] = name
            self.files[CONFIG_NAME] = _to_bytes(self._object(CONFIG_NAME) | {"mask_token": name})
        return given

    def _add(self, definition: dict[str, Any], names: Sequence[str]) -> None:
        """Adds special tokens behind all others."""
        tokens = definition.setdefault("added_tokens", [])
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ids = {name: token for token, name in enumerate(names, self._count())}
        tokens += [{"id": token, "content": name} | flags | {"special": True} for name, token in ids.items()]
        self.files[JSON_NAME] = _to_bytes(definition)
        self._tokenizer = self._parse(self.files[JSON_NAME])
        if any(self._tokenizer.token_to_id(name) != token for name, token in ids.items()):
            raise self._error(
                JSON_NAME, f"there is no mask token, and {MASK} cannot be added, as token IDs below {self._count()} "
                "are left out; add one"
            )  # fmt: skip


def _to_bytes(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
    return text.encode(errors="backslashreplace")  # half a surrogate pair as the escape that JSON had


def _content(token: Any) -> str | None:
    """The text of a token in a configuration: the value itself or its "content"."""
    content = token.get("content") if isinstance(token, dict) else token
    is_text = isinstance(content, str) and not any("\ud800" <= character <= "\udfff" for character in content)
    return content if is_text else None


def _unknown(definition: dict[str, Any], tokenizer: Any) -> int:
    """What the model of a tokenizer makes of characters that it does not know."""
    model = definition["model"]
    if type(model.get("unk_id")) is int:
        return model["unk_id"]
    token = tokenizer.token_to_id(model["unk_token"]) if isinstance(model.get("unk_token"), str) else None
    return -1 if token is None else token


def _decoder_types(definition: dict[str, Any]) -> list[str]:
    decoder = definition.get("decoder") or {}
    return [step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step]


@functools.cache
def _byte_characters() -> dict[str, int]:
    """The character by which a byte-level vocabulary writes each byte: itself where it can be seen."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + index): byte for index, byte in enumerate(hidden)}
