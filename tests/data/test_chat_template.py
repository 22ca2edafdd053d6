"""Qwen3's and Llama 3's templates, with what `transformers` makes of them, and templates that mean ill."""

import sys

import byte_level
import pytest

from refusion_jax.data.chat_template import _compile, render_template
from refusion_jax.data.examples import DataError

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "2+2?"}
MORE = {"role": "user", "content": "And?"}
FOUR = {"role": "assistant", "content": "\n\nFour."}
THOUGHT = {"role": "assistant", "content": "Four.", "reasoning_content": "\nadd\n"}
INLINE = {"role": "assistant", "content": "<think>\nadd\n</think>\n\nFour."}
PROMPT = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


def qwen3(messages, add_generation_prompt=False, **variables):
    source = (byte_level.TEMPLATES / "qwen3.jinja").read_text()
    return render_template(
        source, {"messages": messages, "add_generation_prompt": add_generation_prompt} | variables, "place"
    )


def test_qwen3_prompts():
    assert qwen3([ASK], True, enable_thinking=True) == PROMPT
    assert qwen3([ASK], True, enable_thinking=False) == PROMPT + "<think>\n\n</think>\n\n"
    assert qwen3([SYSTEM, ASK], True) == "<|im_start|>system\nBe brief.<|im_end|>\n" + PROMPT


@pytest.mark.parametrize(
    ("answer", "last", "earlier"),
    [
        (FOUR, "<think>\n\n</think>\n\nFour.<|im_end|>\n", "\n\nFour.<|im_end|>\n"),
        (THOUGHT, "<think>\nadd\n</think>\n\nFour.<|im_end|>\n", "Four.<|im_end|>\n"),
        (INLINE, "<think>\nadd\n</think>\n\nFour.<|im_end|>\n", "Four.<|im_end|>\n"),
    ],
)
def test_qwen3_shows_thoughts_of_the_last_answer_only(answer, last, earlier):
    assert qwen3([ASK, answer]) == PROMPT + last
    assert qwen3([ASK, answer, MORE]) == PROMPT + earlier + "<|im_start|>user\nAnd?<|im_end|>\n"


def test_qwen3_tools():
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": "é<"}}]}
    text = qwen3([ASK, call, {"role": "tool", "content": "4"}])
    assert '<tool_call>\n{"name": "f", "arguments": {"x": "é<"}}\n</tool_call><|im_end|>\n' in text
    assert text.endswith("<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n")


def test_llama3():
    source = (byte_level.TEMPLATES / "llama3.jinja").read_text()
    variables = {"messages": [SYSTEM, ASK], "bos_token": "<|begin_of_text|>", "add_generation_prompt": True}
    assert render_template(source, variables, "place") == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "2+2?"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ {'a': 'é<'} | tojson(indent=1) }}", '{\n "a": "é<"\n}'),
        ("  {% if true %}\n  x\n  {% endif %}", "  x\n"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("[{{ bos_token }}]", "[]"),
    ],
)
def test_what_templates_can_use(source, text):
    assert render_template(source, {"messages": [ASK]}, "place") == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Roles must\nalternate.') }}", "Roles must alternate"),
        ("{{ nothing.there }}", "'nothing' is undefined"),
        ("{% if %}", "Expected an expression, got 'end of statement block'"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ range(10**9) | length }}", "a call has too large a number"),
        ("{% include '/etc/passwd' %}", "no loader for this environment specified"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
    ],
)
def test_a_template_that_refuses_fails_or_means_ill_is_one_sentence(source, reason):
    with pytest.raises(DataError) as error:
        render_template(source, {"messages": [ASK]}, "there/chat_template.jinja")
    message = str(error.value)
    assert message.startswith("there/chat_template.jinja: the chat template cannot write this conversation (")
    assert reason in message and "\n" not in message and len(message) < 450


def test_without_jinja(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    _compile.cache_clear()
    with pytest.raises(DataError, match=r"^place: a chat template needs Jinja; pip install refusion_jax\[hf\]\.$"):
        qwen3([ASK])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'x' * 10**10 }}", "makes too much"),
        ("{{ 10**10 * 'x' }}", "makes too much"),
        ("{{ [1] * 10**8 }}", "makes too much"),
        ("{{ 2**100 }}", "makes too much"),
        ("{{ '%0999999999d' % 1 }}", "makes too much"),
        ("{{ '{:>999999999}'.format(1) }}", "too wide"),
        ("{{ 'x'.ljust(1000000000) }}", "too large a number"),
        ("{{ 'x'|indent(1000000000, true) }}", "more than 1000"),
        ("{{ 'x'|center(1000000000) }}", "No filter named 'center'"),
        ("{{ lipsum(10) }}", "'lipsum' is undefined"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 1,000,000 steps"),
        ("{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "writes more than 10,000,000 characters"),
    ],
)
def test_a_few_characters_do_not_make_gigabytes(template, reason):
    with pytest.raises(DataError, match=reason):
        render_template(template, {}, "place")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '-' * 3 }}{{ 3 * [1] }}{{ 6 * 7 }}{{ 2 ** 10 }}{{ 7 % 4 }}", "---[1, 1, 1]4210243"),
        ("{{ '%s of %03d' % ('a', 7) }}{{ '{:>4}'.format(1) }}{{ 'a{}'.format(20241231) }}", "a of 007   1a20241231"),
        ("{% for i in range(2, 8, 3) %}{{ i }}{% if not loop.last %},{% endif %}{% endfor %}", "2,5"),
        ("{{ range(4)|length }}{{ 'a\nb'|indent(2) }}", "4a\n  b"),
        ("{{ raise_exception is defined }}{{ 'a' ~ 'b' }}", "Trueab"),
    ],
)
def test_what_templates_do(template, text):
    assert render_template(template, {}, "place") == text


def test_a_template_s_own_message_is_shown():
    for call, shown in (
        ("'alternate user/assistant...'", r"user/assistant\.\.\.\)"),
        ("", "it refuses the conversation"),
    ):
        with pytest.raises(DataError, match=shown):
            render_template(f"{{{{ raise_exception({call}) }}}}", {}, "place")
