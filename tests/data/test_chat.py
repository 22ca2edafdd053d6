import json

import pytest

from refusion_jax.data.chat import check_messages, render_chatml
from refusion_jax.data.examples import DataError


def turns(*pairs, **fields):
    return [{"role": role, "content": content} | fields for role, content in pairs]


def test_messages_are_copied_as_plain_json_without_nulls():
    given = turns(("system", ""), ("user", "a"), ("assistant", "b"), ("tool", "c"), tools=None, extra=({"x": [1]},))
    checked = check_messages(given)
    assert checked == turns(("system", ""), ("user", "a"), ("assistant", "b"), ("tool", "c"), extra=[{"x": [1]}])
    assert checked[0] is not given[0] and json.loads(json.dumps(checked)) == checked


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ("hello", 'p: expected a list of messages, but found "hello".'),
        ({"role": "user"}, 'p: expected a list of messages, but found {"role": "user"}.'),
        ([], "p: the list of messages is empty; a conversation has at least one."),
        (["a"], 'p, message 1: expected an object with a role and a content, but found "a".'),
        ([{"role": "user"}], "p, message 1: expected the field 'content', but the fields there are: 'role'."),
        ([{}], "p, message 1: expected the field 'role', but the fields there are: none."),
        (turns(("user", None)), "p, message 1: expected the field 'content' to be a string, but found null."),
        (turns(("user", "a"), (3, "a")), "p, message 2: expected the field 'role' to be a string, but found 3."),
        (turns(("bot", "a")), 'p, message 1: the role is "bot", not one of system, user, assistant, tool.'),
        (turns(("user", "a"), ("system", "b")), "p, message 2: a system message must be the conversation's first."),
        (
            turns(("user", "\ud800")),
            "p, message 1: expected the field 'content' to be valid Unicode, but it has half a surrogate pair.",
        ),
        (
            turns(("user", "a"), x=["\ud800"]),
            "p, message 1: expected the field 'x' to be valid Unicode, but it has half a surrogate pair.",
        ),
        (turns(("user", "a"), x={1, 2}), "p, message 1: expected the field 'x' to be JSON, but found \"{1, 2}\"."),
    ],
)
def test_other_values_are_refused_in_one_sentence(messages, sentence):
    with pytest.raises(DataError) as error:
        check_messages(messages, "p")
    assert str(error.value) == sentence


def test_chatml():
    messages = turns(("system", "s"), ("user", " 1\n"), ("assistant", "one"))
    text = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n 1\n<|im_end|>\n<|im_start|>assistant\n"
    assert render_chatml(messages[:2], add_generation_prompt=True) == text
    assert render_chatml(messages, add_generation_prompt=False) == f"{text}one<|im_end|>\n"
    with pytest.raises(DataError, match=r"^Message 2 is from a tool, but the tokenizer has no chat template"):
        render_chatml(turns(("user", "1"), ("tool", "2")), add_generation_prompt=True)
