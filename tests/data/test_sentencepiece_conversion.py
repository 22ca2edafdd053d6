"""Sentencepiece models in the format of the `tokenizers` library: the same tokens for the same texts."""

import io

import numpy as np
import pytest
import sentencepiece
import tokenizers

from refusion_jax.data import load_tokenizer, train_tokenizer
from refusion_jax.data.chat import CHATML_TEMPLATE, render_chatml
from refusion_jax.data.chat_template import render_template
from refusion_jax.data.huggingface_tokenizer import HuggingFaceTokenizer
from refusion_jax.data.sentencepiece_conversion import to_tokenizer_json
from refusion_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer

WORDS = [
    "the",
    "three",
    "cats",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "they",
    "went",
    "home",
    "with",
    "12",
    "+",
    "34",
]


def sentences(seed, count):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=rng.integers(1, 20))) + "." for _ in range(count)]


@pytest.fixture(scope="module", params=[("char", 400), ("char", 40), ("bpe", 420), ("unigram", 340)], ids=str)
def pair(request):
    kind, size = request.param
    ours = train_tokenizer(sentences(0, 200), kind, size)
    return ours, tokenizers.Tokenizer.from_str(to_tokenizer_json(ours.files["tokenizer.model"]).decode())


def test_the_same_tokens_and_texts(pair):
    ours, theirs = pair
    texts = [*sentences(1, 300), "  two  spaces\n\n", "", "a", "\t", "<0x41> <unk"]
    if ours.vocab_size > 256:
        texts += ["naïve 日本語 😀", "Über"]
    known = [text for text in texts if ours.unk_token_id not in ours.encode(text)]
    assert len(known) >= 300
    for text in known:
        tokens = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False).ids == tokens
        assert theirs.decode(tokens) == text


def test_special_tokens_are_no_text(pair):
    ours, theirs = pair
    assert theirs.get_vocab_size() == ours.vocab_size
    special = [ours.pad_token_id, ours.eos_token_id, ours.mask_token_id, ours.unk_token_id]
    assert theirs.decode([*special, *ours.encode("a mat")]) == "a mat"


def test_a_model_that_changes_texts_is_left_alone(tmp_path):
    """What normalises or adds a space has no exact counterpart."""
    for changes in ({"normalization_rule_name": "nfkc"}, {"add_dummy_prefix": True}):
        model = io.BytesIO()
        plain = {"normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences(0, 50)), model_writer=model, vocab_size=60, model_type="bpe",
            pad_id=0, eos_id=1, unk_id=3, bos_id=-1, control_symbols=["<mask>"], minloglevel=2, **plain | changes,
        )  # fmt: skip
        assert to_tokenizer_json(model.getvalue()) is None
        SentencePieceTokenizer(model.getvalue()).export(tmp_path / "out")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.model"]


def test_an_export_loads_as_either(pair, tmp_path):
    """As the sentencepiece model here, and from the other files alone as what other programs see."""
    ours, _ = pair
    ours.export(tmp_path)
    assert isinstance(load_tokenizer(tmp_path), SentencePieceTokenizer)
    (tmp_path / "tokenizer.model").unlink()
    theirs = load_tokenizer(tmp_path)
    assert isinstance(theirs, HuggingFaceTokenizer)
    for name in ("vocab_size", "pad_token_id", "eos_token_ids", "mask_token_id", "unk_token_id"):
        assert getattr(theirs, name) == getattr(ours, name)
    assert theirs.encode("a mat") == ours.encode("a mat")


def test_a_sentencepiece_model_without_a_mask_gives_way(pair, tmp_path):
    """Those that lie beside a tokenizer.json on the Hub have none."""
    ours, _ = pair
    ours.export(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"of another kind")
    assert isinstance(load_tokenizer(tmp_path), HuggingFaceTokenizer)


@pytest.mark.parametrize("prompt", [True, False])
def test_the_template_of_an_export_is_chatml(prompt):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n"}]
    variables = {"messages": messages, "add_generation_prompt": prompt}
    got = render_template(CHATML_TEMPLATE, variables, "the template")
    assert got == render_chatml(messages, add_generation_prompt=prompt)
