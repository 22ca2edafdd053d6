"""`tokenizer.json` and the files beside it: special tokens, chat templates, and files that are something else."""

import json
import sys

import byte_level
import pytest
import tokenizers
from tokenizers import models, processors

from refusion_jax.data.examples import DataError
from refusion_jax.data.huggingface_tokenizer import HuggingFaceTokenizer
from refusion_jax.data.tokenizer_files import load_tokenizer

ASK = [{"role": "user", "content": "2+2?"}]


def words(count, *special):
    """A tokenizer of so many words, then special tokens."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({str(i): i for i in range(count)}, unk_token="0"))
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def load(directory, mask_token_id=None, **fields):
    return load_tokenizer(byte_level.write(directory, **fields), mask_token_id)


def test_round_trip_with_special_tokens_written_in_the_text(tmp_path):
    tokenizer = load(tmp_path)
    text = "<|im_start|>user\nnaïve 日本 😀\n<think>  \n</think><|im_end|>\n"
    tokens = tokenizer.encode(text)
    assert tokens[0] == 321 and tokenizer.eos_token_id in tokens
    assert tokenizer.decode(tokens) == "user\nnaïve 日本 😀\n<think>  \n</think>\n"
    assert tokenizer.encode_batch([text, ""]) == [tokens, []]


def test_nothing_is_added_cut_or_filled_up(tmp_path):
    inner = byte_level.train(byte_level.CORPUS, 320)
    expected = inner.encode("the cat sat on the mat").ids
    inner.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", 320), ("<|im_end|>", 322)]
    )
    inner.enable_truncation(3)
    inner.enable_padding(length=20)
    tokenizer = load(tmp_path, tokenizer=inner)
    assert tokenizer.encode("the cat sat on the mat") == expected


def test_refusion_s_official_token_ids(tmp_path):
    """Qwen3's tokenizer has 151,669 tokens."""
    tokenizer = load(tmp_path, tokenizer=words(151_667, "<|endoftext|>", "<|im_end|>"))
    assert tokenizer.encode("<|beginoftext|><|mask|>") == [151_669, 151_670]
    assert (tokenizer.bos_token_id, tokenizer.mask_token_id, tokenizer.vocab_size) == (151_669, 151_670, 151_671)


@pytest.mark.parametrize("name", ["<|mask|>", "<|mdm_mask|>", "<mask>", "[MASK]"])
def test_a_mask_of_a_known_name_is_used_and_the_files_stay_as_they_are(tmp_path, name):
    tokenizer = load(tmp_path, tokenizer=words(8, "<|endoftext|>", name, "<|im_end|>"))
    assert (tokenizer.mask_token_id, tokenizer.vocab_size, tokenizer.bos_token_id) == (9, 11, None)
    assert tokenizer.files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_whose_word_counts_about_the_mask(tmp_path):
    inner = words(8, "<|endoftext|>", "<|im_end|>", "<mask>", "<other>")
    assert load(tmp_path, tokenizer=inner).mask_token_id == 10
    named = load(tmp_path, tokenizer=inner, mask_token={"content": "<other>"})
    assert named.mask_token_id == 11
    given = load(tmp_path, mask_token_id=3, tokenizer=inner, mask_token="<other>")
    assert given.mask_token_id == 3 and given.vocab_size == 12
    given.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").mask_token_id == 3
    beyond = load(tmp_path, mask_token_id=40, tokenizer=inner)
    assert beyond.mask_token_id == 40 and beyond.vocab_size == 12


def test_a_mask_that_is_added_is_saved_and_may_be_the_one_that_is_given(tmp_path):
    inner = words(8, "<|endoftext|>", "<|im_end|>")
    for mask_token_id in (None, 11):
        tokenizer = load(tmp_path, mask_token_id=mask_token_id, tokenizer=inner)
        assert (tokenizer.bos_token_id, tokenizer.mask_token_id) == (10, 11)
        tokenizer.save(tmp_path / "saved")
        again = load_tokenizer(tmp_path / "saved")
        assert again.files == tokenizer.files and again.mask_token_id == 11
    with_bos = load(tmp_path, tokenizer=inner, bos_token="<|endoftext|>")
    assert (with_bos.bos_token_id, with_bos.mask_token_id, with_bos.vocab_size) == (8, 10, 11)


def test_every_eos_counts_the_tokenizer_s_first(tmp_path):
    assert load(tmp_path, generation={"eos_token_id": [320, 322]}).eos_token_ids == (322, 320)
    assert load(tmp_path, generation={"eos_token_id": 320}).eos_token_ids == (322, 320)
    assert load(tmp_path, generation={"eos_token_id": [320, 7]}, eos_token=None).eos_token_ids == (320, 7)
    tokenizer = load(tmp_path, generation={}, eos_token={"content": "<|endoftext|>"}, pad_token=None)
    assert tokenizer.eos_token_ids == (320,) and tokenizer.pad_token_id == 320


def test_special_tokens_map_and_unknown_token(tmp_path):
    byte_level.write(tmp_path, tokenizer=words(4, "<e>", "<p>"), eos_token=None, pad_token=None)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<e>"}, "pad_token": "<p>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (4, 5, 0)
    assert load(tmp_path / "other").unk_token_id == -1


def test_where_a_chat_template_comes_from(tmp_path):
    def rendered(template):
        tokenizer = load(tmp_path, template=None, chat_template=template)
        return tokenizer.render(ASK, add_generation_prompt=False, enable_thinking=False)

    assert rendered(None) == "<|im_start|>user\n2+2?<|im_end|>\n"
    assert rendered("{{ eos_token }}{{ bos_token }}{{ enable_thinking }}") == "<|im_end|>False"
    assert rendered([{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered("d") == "file"


def test_the_template_is_part_of_the_fingerprint(tmp_path):
    prints = {load(tmp_path, template=template).fingerprint for template in ("qwen3", "llama3", None)}
    assert len(prints) == 3 and load(tmp_path, template="qwen3").fingerprint in prints


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("tokenizer.json", b"{", "expected JSON, but at line 1"),
        ("tokenizer.json", b'{"a": "\xff"}', "expected UTF-8 text, but the byte at offset 7"),
        ("tokenizer.json", b'{"a": ' * 50_000, "nested too deeply"),
        ("tokenizer.json", b'{"vocab": {"a": 0}}', "expected a tokenizer of the `tokenizers` library (", ),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "has no tokens"),
        ("tokenizer.json", b'{"model": {"type": "WordLevel", "vocab": {"a": 9}, "unk_token": "a"}}', "left out"),
        ("tokenizer_config.json", b"[]", "expected a JSON object, but it is of type list"),
        ("tokenizer_config.json", b"{}", "there is no EOS token"),
        ("tokenizer_config.json", b'{"eos_token": 7}', "eos_token must be a text or an object"),
        ("tokenizer_config.json", b'{"eos_token": "\\ud800"}', "eos_token must be a text or an object"),
        ("tokenizer_config.json", b'{"eos_token": ' + b"1" * 5_000 + b"}", "expected JSON, but Exceeds the limit"),
        ("tokenizer_config.json", b'{"eos_token": {"text": "a"}}', "eos_token must be a text or an object"),
        ("tokenizer_config.json", b'{"eos_token": "</s>"}', 'eos_token is "</s>", which is no token of'),
        ("tokenizer_config.json", b'{"eos_token": "a", "pad_token": []}', "pad_token must be a text"),
        ("tokenizer_config.json", b'{"eos_token": "a", "mask_token": "<m>"}', "which is no token"),
        ("tokenizer_config.json", b'{"eos_token": "a", "chat_template": 3}', "chat_template must be a text"),
        ("tokenizer_config.json", b'{"eos_token": "a", "chat_template": [{"name": "default"}, 3]}', "named 'default'"),
        ("tokenizer_config.json", b'{"eos_token": "a", "chat_template": [{"name": "rag"}]}', "named 'default'"),
        ("tokenizer_config.json", b'{"eos_token": "a", "chat_template": []}', None),
        ("chat_template.jinja", b"\xff", "expected UTF-8 text"),
        ("generation_config.json", b'{"eos_token_id": "x"}', 'eos_token_id has "x", which is no token ID below 327'),
        ("generation_config.json", b'{"eos_token_id": [327]}', "eos_token_id has 327"),
        ("generation_config.json", b'{"eos_token_id": [true]}', "eos_token_id has true"),
        ("generation_config.json", b"nothing", "expected JSON, but at line 1"),
    ],
)  # fmt: skip
def test_files_that_are_something_else_are_refused_in_one_sentence(tmp_path, name, content, part):
    inner = byte_level.train(byte_level.CORPUS, 320, special=(*byte_level.SPECIAL, "<|mask|>", "<x>"))
    byte_level.write(tmp_path, tokenizer=inner)
    (tmp_path / name).write_bytes(content)
    if part is None:
        assert load_tokenizer(tmp_path).chat_template == ""
        return
    with pytest.raises(DataError) as error:
        load_tokenizer(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{tmp_path}/{name}: ") and part in message and "\n" not in message
    assert len(message) < len(str(tmp_path)) + 300


def test_without_the_library(tmp_path, monkeypatch):
    byte_level.write(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    sentence = r"tokenizer\.json: reading it needs `tokenizers`; pip install refusion_jax\[hf\]\.$"
    with pytest.raises(DataError, match=sentence):
        load_tokenizer(tmp_path)


def test_from_bytes_alone(tmp_path):
    files = {path.name: path.read_bytes() for path in byte_level.write(tmp_path).iterdir()}
    tokenizer = HuggingFaceTokenizer(files)
    assert json.loads(tokenizer.files["tokenizer.json"])["added_tokens"][-1]["content"] == "<|mask|>"
    assert tokenizer.fingerprint == load_tokenizer(tmp_path).fingerprint
