"""What holds for every tokenizer: text that is cut anywhere, saving, finding."""

import random

import byte_level
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from refusion_jax.data.examples import DataError
from refusion_jax.data.sentencepiece_tokenizer import train_tokenizer
from refusion_jax.data.tokenizer_files import find_tokenizer, load_tokenizer

CUT = ["日本語☃ and 😀👩‍👩‍👧 naïve", "😀", "\ufffd in \ufffd", "é" * 5, "", "the cat \u2581 <think>日</think>"]


def byte_fallback():
    """Characters, and bytes for those it does not know, as Llama 2's."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehinotkv<>/ï"]
    model = models.BPE({piece: token for token, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<|im_end|>", "<|endoftext|>"])
    return tokenizer


@pytest.fixture(scope="module", params=["char", "bpe", "unigram", "byte_level", "byte_fallback"])
def tokenizer(request, tmp_path_factory):
    if request.param == "byte_level":
        return load_tokenizer(byte_level.write(tmp_path_factory.mktemp("hf") / "t"))
    if request.param == "byte_fallback":
        directory = tmp_path_factory.mktemp("fallback") / "t"
        return load_tokenizer(byte_level.write(directory, tokenizer=byte_fallback(), template=None))
    return train_tokenizer(byte_level.CORPUS[:3], request.param, 320)


@pytest.mark.parametrize("text", CUT)
def test_text_cut_at_every_token_is_a_prefix_without_half_characters(tokenizer, text):
    tokens = tokenizer.encode(text)
    if tokenizer.decode(tokens) != text:  # a byte-fallback vocabulary takes its symbol for a space
        text = text.replace("\u2581", " ")
    assert tokenizer.decode(tokens) == text
    for end in range(len(tokens) + 1):
        for at_start in (True, False):
            part = tokenizer.decode_whole(tokens[:end], at_start=at_start)
            assert text.startswith(part)
            assert part.count("\ufffd") <= text.count("\ufffd")
        assert text.endswith(rest := tokenizer.decode_whole(tokens[end:])), rest
        assert len(part) + len(rest) >= len(text) - 1  # the character that the cut goes through
    assert tokenizer.decode_whole(tokens) == text


def test_text_of_any_tokens_only_grows(tokenizer):
    draws = random.Random(0)
    for _ in range(200):
        tokens = [draws.randrange(min(tokenizer.vocab_size, 260)) for _ in range(6)]
        parts = [tokenizer.decode_whole(tokens[:end], at_start=True) for end in range(7)]
        assert all(map(str.startswith, parts[1:], parts)), parts
        assert tokenizer.decode(tokens).startswith(parts[-1])


def test_special_tokens_are_no_text_and_others_are_refused(tokenizer):
    tokens = [tokenizer.mask_token_id, *tokenizer.encode("the cat"), tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(tokens) == tokenizer.decode_whole(tokens) == "the cat"
    for method in (tokenizer.decode, tokenizer.decode_whole):
        with pytest.raises(DataError, match=f"{tokenizer.vocab_size} is outside"):
            method([tokenizer.vocab_size])
        with pytest.raises(DataError, match="-1 is outside"):
            method([-1])
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("\ud800")


def test_saves_and_is_found(tokenizer, tmp_path):
    assert find_tokenizer(tmp_path) is None and find_tokenizer(tmp_path / "nowhere") is None
    tokenizer.save(tmp_path / "deep" / "t")
    tokenizer.save(tmp_path / "deep" / "t")
    saved = {path.name: path.read_bytes() for path in (tmp_path / "deep" / "t").iterdir()}
    assert saved == tokenizer.files
    found = find_tokenizer(tmp_path / "deep" / "t")
    assert found.fingerprint == tokenizer.fingerprint
    for name in ("vocab_size", "unk_token_id", "pad_token_id", "eos_token_ids", "bos_token_id", "mask_token_id"):
        assert getattr(found, name) == getattr(tokenizer, name)
    assert found.encode_batch(CUT) == tokenizer.encode_batch(CUT)


def test_a_directory_s_tokenizer_json_is_preferred(tmp_path):
    train_tokenizer(["abc"], "char", 64).export(tmp_path)
    assert set(load_tokenizer(tmp_path).files) == {"tokenizer.model"}
    byte_level.write(tmp_path)
    for path in (tmp_path, str(tmp_path / "tokenizer.json")):
        assert set(load_tokenizer(path).files) == {"tokenizer.json", "tokenizer_config.json"}
