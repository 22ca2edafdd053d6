"""Objects with conversations or pairs, a chat template and its tokens."""

import json

import byte_level
import pytest

from refusion_jax.config import DataConfig
from refusion_jax.data.conversations import Conversations
from refusion_jax.data.examples import DataError, Example
from refusion_jax.data.pipeline import load_dataset
from refusion_jax.data.records import to_examples
from refusion_jax.data.sentencepiece_tokenizer import train_tokenizer
from refusion_jax.data.tokenized import tokenize
from refusion_jax.data.tokenizer_files import load_tokenizer
from refusion_jax.data.whole import encode_whole

PROMPT = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
THINK = "<think>\n\n</think>\n\n"
USER, FOUR = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Four."}
WHOLE = Example(PROMPT, "Four.", PROMPT + THINK + "Four.<|im_end|>\n")
HALVES = Example(PROMPT, "Four.")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(byte_level.write(tmp_path_factory.mktemp("tokenizer") / "t"))


def with_template(directory, template, **config):
    return load_tokenizer(byte_level.write(directory, template=None, chat_template=template, **config))


def examples(tokenizer, value, **fields):
    config = DataConfig(source="json", train_files=("f",), **fields)
    return to_examples(config, value, "f, line 1", Conversations.of(config, tokenizer))


@pytest.mark.parametrize(
    ("value", "fields"),
    [
        ({"messages": [USER, FOUR]}, {}),
        ({"messages": [USER, FOUR], "prompt": "2+2?"}, {}),
        ({"chat": [USER, FOUR]}, {"messages_field": "chat"}),
        ({"prompt": [USER], "completion": [FOUR]}, {}),
        ({"query": [USER], "response": [FOUR]}, {}),
        ({"prompt": "2+2?", "completion": "Four."}, {"template": "whole"}),
        ({"query": "2+2?", "response": "Four."}, {"template": "whole"}),
        ({"q": "2+2?", "a": "Four."}, {"template": "whole", "prompt_field": "q", "response_field": "a"}),
        ({"query": "2+2?", "response": "Four.", "a": 1}, {"template": "whole", "format": "pairs"}),
    ],
)
def test_auto_looks_at_each_object(tokenizer, value, fields):
    assert examples(tokenizer, value, **fields) == [WHOLE]


def test_pairs_stay_as_they_are_unless_a_template_is_asked_for(tokenizer):
    pair = {"query": "2+2?", "response": "Four."}
    assert examples(tokenizer, pair) == [Example("2+2?", "Four.")]
    assert examples(tokenizer, pair, template="prompt") == [HALVES]
    assert examples(None, pair, template="prompt") == [HALVES]
    assert examples(tokenizer, {"query": " ", "response": "Four."}, template="whole") == [Example(" ", "Four.")]


def test_thinking_is_part_of_the_prompt_where_it_is_not_enabled(tokenizer):
    value = {"messages": [USER, FOUR]}
    prompt = PROMPT + THINK
    assert examples(tokenizer, value, enable_thinking=False) == [Example(prompt, "Four.", WHOLE.rendered)]
    assert examples(tokenizer, value, enable_thinking=False, template="prompt") == [Example(prompt, "Four.")]
    assert examples(tokenizer, value, template="prompt") == [HALVES]


def test_chatml_is_whole_only_when_asked_for():
    sentencepiece = train_tokenizer(byte_level.CORPUS, "char", 400)
    for tokenizer in (None, sentencepiece):
        assert examples(tokenizer, {"messages": [USER, FOUR]}) == [HALVES]
        whole = examples(tokenizer, {"messages": [USER, FOUR]}, template="whole")
        assert whole == [Example(PROMPT, "Four.", PROMPT + "Four.<|im_end|>\n")]


def test_every_turn_of_the_completion_can_be_a_response(tokenizer):
    value = {"prompt": [USER, FOUR, USER], "completion": [FOUR, USER, {"role": "assistant", "content": "4"}]}
    assert [example.response for example in examples(tokenizer, value)] == ["4"]
    assert [example.response for example in examples(tokenizer, value, turns="all")] == ["Four.", "4"]
    both = value["prompt"] + value["completion"]
    responses = [example.response for example in examples(tokenizer, {"messages": both}, turns="all")]
    assert responses == ["Four.", "Four.", "4"]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"a": 1}, "expected the fields 'query' and 'response', or 'messages', or 'prompt' and 'completion', but the "
         "fields there are: 'a'."),
        ({"prompt": "a"}, "but the fields there are: 'prompt'."),
        ([1], "expected a JSON object, but found [1]."),
        ({"prompt": [USER], "completion": "a"}, "expected the field 'prompt' to be a string, but found [{"),
        ({"prompt": "a", "completion": [FOUR]}, "expected the field 'completion' to be a string, but found [{"),
        ({"prompt": [USER], "completion": []}, "none of the 0 messages is from the assistant."),
    ],
)  # fmt: skip
def test_other_objects_are_refused(tokenizer, value, sentence):
    with pytest.raises(DataError) as error:
        examples(tokenizer, value)
    assert str(error.value).startswith("f, line 1: ") and sentence in str(error.value)


def test_what_the_template_refuses_names_the_place(tmp_path):
    refusing = with_template(tmp_path, "{{ raise_exception('No system role.') }}")
    sentence = r"^f, line 1: .*/tokenizer_config\.json: the chat template cannot write .* \(No system role\)\.$"
    with pytest.raises(DataError, match=sentence):
        examples(refusing, {"messages": [USER, FOUR]})


# ---- tokens of the whole -------------------------------------------------------------------------------------------


def test_the_response_ends_with_eos_and_the_line_end_after_it_is_cut(tokenizer):
    [(prompt, response)] = encode_whole([WHOLE], tokenizer)
    assert prompt == tokenizer.encode(PROMPT)
    assert response == [*tokenizer.encode(THINK + "Four."), tokenizer.eos_token_id]
    pair = Example("S:7+1?", "8.")
    tokenized, counts = tokenize([WHOLE, pair, WHOLE], tokenizer, 64)
    assert counts.kept == 3 and tokenized.prompt_lengths[0] == len(prompt)
    first, second = (tokenized.tokens[slice(*tokenized.offsets[i : i + 2])].tolist() for i in (0, 1))
    assert first == prompt + response
    assert second == [*tokenizer.encode("S:7+1?"), *tokenizer.encode("8."), tokenizer.eos_token_id]
    assert tokenized.source_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        ("", ""),
        (" \n", " \n"),
        ("<|im_end|>", None),
        ("<|endoftext|> \n\n", None),
        ("<|im_end|>\n<|im_start|>", "<|im_end|>\n<|im_start|>"),
    ],
)
def test_where_a_response_ends(tmp_path, end, kept):
    tokenizer = load_tokenizer(byte_level.write(tmp_path, generation={"eos_token_id": [322, 320]}))
    [(_, response)] = encode_whole([Example("ab", "c", "abc" + end)], tokenizer)
    if kept is None:
        assert response == tokenizer.encode("c" + end.strip())
    else:
        assert response == [*tokenizer.encode("c" + kept), tokenizer.eos_token_id]


def test_responses_are_filled_up_with_the_eos_they_end_with(tmp_path):
    tokenizer = load_tokenizer(byte_level.write(tmp_path, generation={"eos_token_id": [322, 320]}))
    whole = [Example("ab", "c", "abc<|endoftext|>"), Example("ab", "c", "abc<|im_end|>")]
    tokenized, _ = tokenize(whole, tokenizer, 16, pad_responses=4)
    last = [tokenizer.encode(end) * 3 for end in ("<|endoftext|>", "<|im_end|>")]
    assert last[0] != last[1]
    assert tokenized.tokens.reshape(2, -1)[:, -3:].tolist() == last


def test_a_response_without_tokens_is_dropped_and_counted(tokenizer):
    _, counts = tokenize([WHOLE, Example("ab", "c", "ab<|im_end|>\n")], tokenizer, 64)
    assert (counts.kept, counts.empty) == (1, 1)


def test_a_template_that_writes_the_prompt_otherwise_is_refused(tmp_path):
    template = (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}{{ 'x' * 80 }}:{% endif %}"
    )
    tokenizer = with_template(tmp_path, template)
    [example] = examples(tokenizer, {"messages": [USER, FOUR]})
    with pytest.raises(DataError) as error:
        encode_whole([example], tokenizer)
    assert str(error.value) == (
        "f, line 1: the chat template does not begin a conversation with what it writes before its response: "
        f"'[2+2?]{'x' * 30}...' became '[2+2?][Four.]'; use another template, or data.template 'prompt', which "
        "tokenizes the response by itself."
    )


def test_a_token_across_the_response_s_beginning_is_refused(tokenizer):
    part, whole = tokenizer.encode("a li"), tokenizer.encode("a line")
    assert whole[: len(part)] != part
    with pytest.raises(DataError) as error:
        encode_whole([Example("a li", "ne", "a line")], tokenizer)
    shown = f"'a li' has {part[:3]} where 'a line' has {whole[:3]};"
    assert str(error.value).startswith(
        f"A conversation: the prompt's token IDs are not the first of the whole conversation's: {shown} use another"
    )


def test_a_dataset_of_conversations(tmp_path):
    byte_level.write(tmp_path / "t")
    file = tmp_path / "chats.jsonl"
    rows = [{"messages": [USER, {"role": "assistant", "content": f"Four, {i}."}]} for i in range(6)]
    file.write_text("\n".join(map(json.dumps, [*rows, {"query": "S:7+1?", "response": "8."}])))
    config = DataConfig(
        source="json", train_files=(str(file),), eval_examples=2, tokenizer=str(tmp_path / "t"),
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    dataset = load_dataset(config, seed=0)
    assert len(dataset.train) == 5 and dataset.held_out_examples[1] == Example("S:7+1?", "8.")
    text = dataset.tokenizer.decode(dataset.train.tokens[: dataset.train.offsets[1]])
    assert text == "user\n2+2?\nassistant\n<think>\n\n</think>\n\nFour, 0."
    again = load_dataset(config, seed=0)
    assert again.held_out_examples == dataset.held_out_examples
    changed = {
        load_dataset(DataConfig(**vars(config) | fields), seed=0).fingerprint
        for fields in ({}, {"template": "prompt"}, {"template": "whole"}, {"enable_thinking": False})
    }
    assert len(changed) == 4 and dataset.fingerprint in changed


def test_generated_pairs_become_turns_where_a_template_is_asked_for():
    config = DataConfig(synthetic_examples=40, eval_examples=4, template="prompt")
    dataset = load_dataset(config, seed=0)
    assert all(example.prompt.endswith("<|im_end|>\n<|im_start|>assistant\n") for example in dataset.held_out_examples)
