"""A sentencepiece model as `tokenizer.json`, which `transformers` and servers built on it read."""

import json
from typing import Any

from sentencepiece import sentencepiece_model_pb2

_SPACE_SYMBOL = "\u2581"
# Numbers of the format: kinds of pieces, and of models.
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3
_UNIGRAM, _BPE, _WORD = 1, 2, 3
# Unigram models would take the text "<0x0A>" for the piece of that byte, if it came whole.
_KEEP_APART = {
    "type": "Split",
    "pattern": {"Regex": "<(?=0x[0-9A-F]{2}>)"},
    "behavior": "Isolated",
    "invert": False,
}


def to_tokenizer_json(model: bytes) -> bytes | None:
    """The model of one of this package's tokenizers in the format of the `tokenizers` library.

    It encodes as sentencepiece does, but for the texts of special tokens, which become these tokens, and the character
    U+2581, which becomes a space.

    Args:
      model: a serialized sentencepiece model.

    Returns:
      the file; None for a model that changes texts before it cuts them, which has no exact counterpart.
    """
    parsed = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    trainer, normalizer = parsed.trainer_spec, parsed.normalizer_spec
    plain = normalizer.name == "identity" and not (normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces)
    if not plain or trainer.model_type == _WORD:
        return None
    unknown = next(piece.piece for piece in parsed.pieces if piece.type == _UNKNOWN)
    if trainer.model_type == _UNIGRAM:
        scores = [[piece.piece, piece.score] for piece in parsed.pieces]
        unknown_id = [piece.type for piece in parsed.pieces].index(_UNKNOWN)
        core: dict[str, Any] = {"type": "Unigram", "unk_id": unknown_id, "vocab": scores}
    else:
        vocabulary = {piece.piece: number for number, piece in enumerate(parsed.pieces)}
        merges = _merges(parsed.pieces) if trainer.model_type == _BPE else []
        core = {"type": "BPE", "unk_token": unknown, "fuse_unk": False, "vocab": vocabulary, "merges": merges}
    special = [
        {"id": number, "content": piece.piece, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, piece in enumerate(parsed.pieces)
        if piece.type in (_CONTROL, _UNKNOWN)
    ]
    contents = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_SYMBOL},
        "pre_tokenizer": _KEEP_APART if trainer.model_type == _UNIGRAM else None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE_SYMBOL}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": core | {"byte_fallback": trainer.byte_fallback},
    }
    return json.dumps(contents, ensure_ascii=False).encode()


def _merges(pieces: Any) -> list[list[str]]:
    """Every way to join two pieces to a third, in the order in which sentencepiece prefers them."""
    ranks = {piece.piece: number for number, piece in enumerate(pieces) if piece.type == _NORMAL}
    joined = sorted(
        ((piece.piece, piece.score) for piece in pieces if piece.type == _NORMAL and len(piece.piece) > 1),
        key=lambda piece: -piece[1],
    )
    merges = []
    for text, _ in joined:
        cuts = [(text[:place], text[place:]) for place in range(1, len(text))]
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        merges += [list(cut) for cut in sorted(known, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))]
    return merges
