import pytest
import sentencepiece

from refusion_jax.data.examples import DataError
from refusion_jax.data.sentencepiece_tokenizer import train_tokenizer
from refusion_jax.data.tokenizer_files import load_tokenizer
from refusion_jax.data.tokenizers import MODEL_NAME

CORPUS = ["the cat sat on the mat", "S:7+1?", "  two  spaces\tand\na line\n", "naïve café"] * 20
TEXTS = [
    "", " ", "   ", "\n", "\r\n", "\t", " lead", "trail ", "a  b   c", "the cat\n\nsat\ton\r\n", "日本語 ☃ 😀",
    "e\u0301 é", "a\0b", "\u2028\u00a0\ufeff\ufffd ⁇", "<mask></s><pad><unk>", "<0x41>",
    "\u2581", " \u2581 \u2581\u2581the", "\u2585x",
]  # fmt: skip
KINDS = ["char", "bpe", "unigram"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return train_tokenizer(CORPUS, request.param, 400)


def test_special_tokens_have_fixed_places(tokenizer):
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id, tokenizer.unk_token_id)
    assert ids == (0, 1, 2, 3)


def test_round_trip_is_exact_and_never_makes_a_special_token(tokenizer):
    for text in TEXTS + CORPUS:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert min(tokens, default=4) >= 4 and max(tokens, default=0) < tokenizer.vocab_size
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_special_names_in_the_corpus_stay_text():
    for kind in KINDS:
        tokenizer = train_tokenizer(["<mask></s> <pad>"] * 50 + CORPUS, kind, 400)
        assert min(tokenizer.encode("<mask></s> <pad>")) >= 4


def test_decode_skips_special_tokens_and_replaces_broken_bytes(tokenizer):
    tokens = tokenizer.encode("the cat")
    assert tokenizer.decode([0, 2, *tokens, 1, 0, 0]) == "the cat"
    assert tokenizer.decode(tokenizer.encode("☃")[:2]).strip("\ufffd") == ""
    with pytest.raises(DataError, match=f"{tokenizer.vocab_size} is outside"):
        tokenizer.decode([tokenizer.vocab_size])
    with pytest.raises(DataError, match="-1 is outside"):
        tokenizer.decode([-1])


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_deterministic_and_vocab_size_a_soft_limit(kind, tmp_path):
    models = []
    for name in ("a", "b"):
        tokenizer = train_tokenizer(CORPUS, kind, 5_000)
        tokenizer.save(tmp_path / name)
        models.append((tmp_path / name / MODEL_NAME).read_bytes())
    assert models[0] == models[1]
    assert tokenizer.vocab_size < 5_000


def test_char_has_every_character_and_nothing_else():
    characters = {character for text in CORPUS for character in text}
    tokenizer = train_tokenizer(CORPUS, "char", 1_000)
    assert tokenizer.vocab_size == 4 + 256 + len(characters)
    assert all(tokenizer.encode(text) == [tokenizer.encode(c)[0] for c in text] for text in CORPUS)
    assert len({tokenizer.encode(c)[0] for c in characters}) == len(characters)


def test_char_without_room_for_bytes_has_an_unknown_token():
    tokenizer = train_tokenizer(["abc d"], "char", 9)
    assert tokenizer.vocab_size == 9
    assert tokenizer.encode("axb") == [tokenizer.encode("a")[0], 3, tokenizer.encode("b")[0]]
    assert tokenizer.decode(tokenizer.encode("axb d")) == "a\ufffdb d"


@pytest.mark.parametrize("corpus", [["\n"], [" "], ["\0"], ["</s>"], ["\u2581"], ["\u2585"], ["a" * 9_000 + "b"]])
@pytest.mark.parametrize("kind", KINDS)
def test_trains_on_odd_corpora(corpus, kind):
    tokenizer = train_tokenizer(corpus, kind, 300)
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in TEXTS + corpus)


@pytest.mark.parametrize(("kind", "size", "needed"), [("char", 8, 9), ("bpe", 264, 265), ("unigram", 9, 265)])
def test_refuses_a_vocabulary_too_small_for_the_characters(kind, size, needed):
    with pytest.raises(DataError, match=f"{size} tokens is too small.*need {needed}"):
        train_tokenizer(["abc d"], kind, size)
    assert train_tokenizer(["abc d"], kind, needed).vocab_size == needed


def test_refuses_an_empty_corpus():
    with pytest.raises(DataError, match="no text"):
        train_tokenizer(["", ""], "bpe", 400)


def test_saves_and_loads_by_file_or_directory(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "run" / "tokenizer")
    tokenizer.save(tmp_path / "run" / "tokenizer")
    assert [file.name for file in (tmp_path / "run" / "tokenizer").iterdir()] == [MODEL_NAME]
    for path in (tmp_path / "run" / "tokenizer", str(tmp_path / "run" / "tokenizer" / MODEL_NAME)):
        loaded = load_tokenizer(path)
        assert loaded.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
        assert loaded.vocab_size == tokenizer.vocab_size


def test_a_failed_save_leaves_nothing(tokenizer, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        tokenizer.save(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04", b'["model"]'])
def test_refuses_what_is_not_a_model(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match="file: expected a sentencepiece model"):
        load_tokenizer(tmp_path / "file")


def test_refuses_missing_files_and_models_without_a_mask(tmp_path):
    with pytest.raises(DataError, match="no such tokenizer file"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"there is no tokenizer file, neither tokenizer.json nor tokenizer.model"):
        load_tokenizer(tmp_path)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=str(tmp_path / "plain"), model_type="char", pad_id=0, eos_id=1,
        unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    with pytest.raises(DataError, match=r"plain\.model: .* no mask \(<mask>\) token"):
        load_tokenizer(tmp_path / "plain.model")


def test_training_is_quiet(capfd):
    train_tokenizer(CORPUS, "bpe", 400)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
