"""Conversations as prompts: what the model is given, and what is refused."""

import dataclasses

import pytest

import refusion_jax as rf
from refusion_jax.data import DataError, train_tokenizer
from refusion_jax.prompts import conversation

pytestmark = pytest.mark.usefixtures("quick_compilation")

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi 😀"}
ASSISTANT = {"role": "assistant", "content": "Hello."}
LONGER = [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "Bye"}]


def text_of(model, prompt):
    return model.tokenizer.decode(rf.prepare(model, prompt, model.decode).layout.tokens)


def test_a_conversation_is_what_the_chat_template_makes_of_it(chat_model):
    assert text_of(chat_model, {"messages": LONGER}) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 😀<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_template_is_told_whether_to_think(chat_model, monkeypatch):
    told = []

    def render(self, messages, **options):
        told.append(options)
        return "x"

    monkeypatch.setattr(type(chat_model.tokenizer), "render", render)
    assert text_of(chat_model, {"messages": [USER]}) == "x"
    text_of(chat_model, {"messages": [USER], "enable_thinking": False})
    assert told == [{"add_generation_prompt": True, "enable_thinking": thinking} for thinking in (True, False)]


def test_the_answer_is_that_to_the_text(chat_model):
    """Beside prompts of other kinds, in lists and in streams."""
    prompts = [{"messages": LONGER}, "x", {"segments": ["x", {"hole": 3}]}, {"messages": (USER,)}]
    texts = [text_of(chat_model, prompts[0]), *prompts[1:3], text_of(chat_model, prompts[3])]
    out, expected = (rf.generate(chat_model, each, batch_size=4) for each in (prompts, texts))
    assert out == expected
    assert out.tokens[0] != out.tokens[3]
    requests = [rf.StreamRequest(index, prompt, chat_model.decode) for index, prompt in enumerate(prompts)]
    answers = rf.generate_stream(chat_model, requests, prompt_length=200, response_length=16, batch_size=4)
    assert [answer.text for answer in sorted(answers, key=lambda answer: answer.index)] == out.text


def test_a_system_message_is_put_first_where_there_is_none():
    assert conversation([USER], system="Be brief.")["messages"] == [SYSTEM, USER]
    assert conversation(LONGER, system="Be kind.")["messages"] == LONGER
    assert conversation([USER])["messages"] == [USER]
    assert conversation([USER], system="")["messages"][0] == {"role": "system", "content": ""}
    with pytest.raises(rf.ConfigError, match=r"message 1.* half a surrogate pair"):
        conversation([USER], system="\ud800")


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ({"messages": []}, "The conversation: the list of messages is empty"),
        ({"messages": "Hi"}, "The conversation: expected a list of messages, but found "),
        ({"messages": USER}, "The conversation: expected a list of messages, but found "),
        ({"messages": ["Hi"]}, "The conversation, message 1: expected an object with a role and a content"),
        (
            {"messages": [USER, {"role": "bot", "content": ""}]},
            'The conversation, message 2: the role is "bot", not one',
        ),
        ({"messages": [USER, {"content": "x"}]}, "The conversation, message 2: expected the field 'role'"),
        ({"messages": [SYSTEM, {"role": "user"}]}, "The conversation, message 2: expected the field 'content'"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "The conversation, message 1: expected the field 'content' to",
        ),
        (
            {"messages": [USER, SYSTEM]},
            "The conversation, message 2: a system message must be the conversation's first",
        ),
        (
            {"messages": [USER, ASSISTANT]},
            "The conversation, message 2: the last message is the assistant's, which leaves nothing to answer",
        ),
        (
            {"messages": [SYSTEM]},
            "The conversation, message 1: the last message is the system's, which leaves nothing to answer",
        ),
        (
            {"messages": [USER], "segments": ["x"]},
            'A conversation is {"messages": [...]}, perhaps with "enable_thinking"',
        ),
        ({"messages": [USER], "prompt": "x"}, 'A conversation is {"messages": [...]}, perhaps with "enable_thinking"'),
        ({"messages": [USER], "enable_thinking": 1}, "'enable_thinking' is 1; it must be true or false."),
        ({"messages": [USER], "enable_thinking": None}, "'enable_thinking' is null; it must be true or false."),
        (
            USER,
            'A template is {"segments": [...]}: a list of texts and {"hole": length}; a conversation is {"messages"',
        ),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "The prompt has 3"),
    ],
)
def test_conversations_that_are_refused(chat_model, prompt, sentence):
    with pytest.raises(rf.ConfigError) as caught:
        rf.generate(chat_model, ["x", prompt])
    assert str(caught.value).startswith("Prompt 1: " + sentence) and "\n" not in str(caught.value)


def test_what_the_template_refuses_is_said(chat_model, monkeypatch):
    def render(self, messages, **options):
        raise DataError("Only one user, please.")

    monkeypatch.setattr(type(chat_model.tokenizer), "render", render)
    with pytest.raises(rf.ConfigError, match=r"^Prompt 0: Only one user, please\.$"):
        rf.generate(chat_model, [{"messages": [USER]}])


def test_a_tokenizer_that_does_not_know_the_templates_characters(chat_model):
    letters = dataclasses.replace(chat_model, tokenizer=train_tokenizer(["Hi"], "char", 16))
    with pytest.raises(
        rf.ConfigError, match="Prompt 0: The conversation in its template has characters that the token"
    ):
        rf.generate(letters, [{"messages": [{"role": "user", "content": "Hi"}]}])


def test_conversations_need_a_tokenizer(chat_model):
    with pytest.raises(rf.ConfigError, match="Prompt 0: The model has no tokenizer, which conversations need; give"):
        rf.generate(dataclasses.replace(chat_model, tokenizer=None), [{"messages": [USER]}])


def test_nothing_stands_before_a_conversation(chat_model):
    for prefix in ("x = 1\n", [5]):
        with pytest.raises(
            rf.ConfigError, match="Prompt 0: A shared prefix would stand before the conversation's begin"
        ):
            rf.generate(chat_model, [{"messages": [USER]}], prefix=prefix)
    assert rf.generate(chat_model, [{"messages": [USER]}], prefix="").text
