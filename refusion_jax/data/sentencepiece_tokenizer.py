"""Text to token IDs and back, exactly, with sentencepiece models; and training such a model on a corpus."""

import io
import json
from collections.abc import Iterable, Mapping, Sequence

import sentencepiece

from refusion_jax.data.chat import CHATML_TEMPLATE
from refusion_jax.data.examples import DataError
from refusion_jax.data.sentencepiece_conversion import to_tokenizer_json
from refusion_jax.data.tokenizers import CONFIG_NAME, JSON_NAME, MODEL_NAME, Tokenizer, without_cut_bytes

_PAD, _EOS, _MASK, _UNK = "<pad>", "</s>", "<mask>", "<unk>"
_SPECIAL = (_PAD, _EOS, _MASK, _UNK)  # in order of token ID, for the models trained here
_NUM_BYTES = 256
# sentencepiece writes a space as this character, so it cannot tell the two apart when it decodes.
_SPACE_SYMBOL = "\u2581"
# sentencepiece marks its own boundaries with this one and leaves out every training text that has it.
_BOUNDARY_SYMBOL = "\u2585"
# The most that sentencepiece accepts.
_MAX_TEXT_BYTES = 1 << 30


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model with pad, EOS and mask tokens, which no text can produce.

    With the models of `train_tokenizer`, `decode(encode(text)) == text` for every text, whatever its white space and
    characters: a character outside the vocabulary becomes its UTF-8 bytes. The one exception is a "char" model whose
    vocabulary has no room for the 256 bytes: there it becomes the unknown token, decoded as U+FFFD.

    Args:
      model: a serialized sentencepiece model.
      source: what messages call the model.

    Raises:
      DataError: when `model` is not a sentencepiece model, or has no pad, EOS or `<mask>` token.
    """

    bos_token_id = None
    chat_template = ""

    def __init__(self, model: bytes, source: str = "the tokenizer"):
        self.files = {MODEL_NAME: model}
        self._processor = _parse_model(model, source)
        self.vocab_size = self._processor.vocab_size()
        self.unk_token_id = self._processor.unk_id()
        self.pad_token_id = self._special_id(self._processor.pad_id(), "pad", source)
        self.eos_token_ids = (self._special_id(self._processor.eos_id(), "EOS", source),)
        self.mask_token_id = self._special_id(self._processor.piece_to_id(_MASK), f"mask ({_MASK})", source)
        # Tokens that stand for a byte, by their ID.
        self._bytes = {self._processor.piece_to_id(f"<0x{byte:02X}>"): byte for byte in range(_NUM_BYTES)}
        self._bytes.pop(self.unk_token_id, None)
        self._byte_tokens = {byte: token for token, byte in self._bytes.items()}

    def _special_id(self, token: int, name: str, source: str) -> int:
        if token < 0 or not self._processor.is_control(token):
            raise DataError(
                f"{source}: the sentencepiece model has no {name} token; train it with pad_id, eos_id and "
                f"control_symbols={_MASK} set."
            )
        return token

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            text.encode()
        rows: list[list[int]] = self._processor.encode(list(texts))
        if len(self._bytes) == _NUM_BYTES:
            for row, text in enumerate(texts):
                if _SPACE_SYMBOL in text:
                    rows[row] = self._encode_space_symbols(text)
        return rows

    def _encode_space_symbols(self, text: str) -> list[int]:
        """Encodes a text that has the character which sentencepiece takes for a space, writing it as bytes."""
        symbol = [self._byte_tokens[byte] for byte in _SPACE_SYMBOL.encode()]
        first, *others = self._processor.encode(text.split(_SPACE_SYMBOL))
        return first + [token for part in others for token in symbol + part]

    def decode(self, tokens: Iterable[int]) -> str:
        return self._processor.decode(self._without_control(tokens))

    def decode_whole(self, tokens: Iterable[int], *, at_start: bool = False) -> str:
        return self._processor.decode(without_cut_bytes(self._without_control(tokens), self._bytes.get, at_start))

    def foreign_files(self) -> Mapping[str, bytes]:
        definition = to_tokenizer_json(self.files[MODEL_NAME])
        if definition is None:
            return {}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHATML_TEMPLATE,
            "eos_token": self._processor.id_to_piece(self.eos_token_id),
            "pad_token": self._processor.id_to_piece(self.pad_token_id),
            "unk_token": self._processor.id_to_piece(self.unk_token_id),
            "mask_token": _MASK,
        }
        return {JSON_NAME: definition, CONFIG_NAME: json.dumps(config, indent=2).encode()}

    def _without_control(self, tokens: Iterable[int]) -> list[int]:
        return [token for token in self._checked(tokens) if not self._processor.is_control(token)]


def _parse_model(model: bytes, source: str) -> sentencepiece.SentencePieceProcessor:
    try:
        # sentencepiece takes no bytes for a request to load nothing, and much for a model without pieces.
        processor = sentencepiece.SentencePieceProcessor(model_proto=model) if model else None
    except RuntimeError:
        processor = None
    if processor is None or processor.vocab_size() == 0:
        raise DataError(f"{source}: expected a sentencepiece model, but it is something else.")
    return processor


def train_tokenizer(texts: Iterable[str], kind: str, vocab_size: int) -> SentencePieceTokenizer:
    """Trains a tokenizer; the same texts give the same model, byte for byte.

    Pad, EOS, mask and unknown are tokens 0 to 3, then come the 256 bytes (see `SentencePieceTokenizer`), then pieces.
    Every character of the texts is one token. The white space and Unicode form of texts are kept as they are.

    Args:
      texts: the corpus; its order does not matter to "char" and little to the others.
      kind: "char" (pieces are the corpus' characters), "bpe" or "unigram".
      vocab_size: most tokens that the model may have; it has fewer when the corpus supports no more.

    Raises:
      DataError: for a corpus without text or a vocabulary too small for its characters.
    """
    texts = list(texts)
    found = set().union(*texts)
    if not found:
        raise DataError("The tokenizer's training corpus has no text.")
    # The space always has a piece: its bytes would be those of the symbol, and decode to that.
    characters = sorted(found - {" ", _BOUNDARY_SYMBOL} | {_SPACE_SYMBOL})
    smallest = len(_SPECIAL) + len(characters)
    byte_fallback = kind != "char" or vocab_size >= smallest + _NUM_BYTES
    smallest += _NUM_BYTES if byte_fallback else 0
    if vocab_size < smallest:
        raise DataError(
            f"A tokenizer of {vocab_size} tokens is too small: the corpus' {len(characters)} characters and the "
            f"special tokens need {smallest}. Raise the vocabulary size to at least that."
        )
    if kind == "char":
        corpus = ["".join(characters)]  # sorted, so that a line end is not last, where sentencepiece strips it
    else:
        # Single characters teach nothing to merge, but sentencepiece gives up on a corpus that it finds empty.
        corpus = characters + [text.replace(_BOUNDARY_SYMBOL, " ") for text in texts]
    return SentencePieceTokenizer(_train(corpus, kind, vocab_size, characters, byte_fallback))


def _train(corpus: list[str], kind: str, vocab_size: int, characters: list[str], byte_fallback: bool) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type=kind,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        byte_fallback=byte_fallback,
        character_coverage=1.0,
        required_chars="".join(characters),
        pad_id=0,
        eos_id=1,
        unk_id=3,
        bos_id=-1,  # no such token, so the mask takes the free place 2
        pad_piece=_PAD,
        eos_piece=_EOS,
        unk_piece=_UNK,
        unk_surface="\ufffd",
        control_symbols=[_MASK],
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentence_length=_MAX_TEXT_BYTES,  # longer ones would be left out
        num_threads=1,  # the model's bytes depend on it
        minloglevel=2,  # errors only
    )
    return model.getvalue()
