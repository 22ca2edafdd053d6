"""The decode command with conversations: one, files of them, and lines of standard input."""

import dataclasses
import io
import json
import os
import signal
import sys
from types import SimpleNamespace

import pytest

import refusion_jax as rf
from refusion_jax import command_line, decode, files
from refusion_jax.decoding import batching, refusion

pytestmark = pytest.mark.usefixtures("quick_compilation")

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi 😀"}
ASSISTANT = {"role": "assistant", "content": "Hello."}


@pytest.fixture(autouse=True)
def same_allocator(monkeypatch):
    monkeypatch.setattr(decode, "keep_freed_memory", lambda: None)


@pytest.fixture(autouse=True, scope="module")
def one_program():
    """All prompts have one length, rounded up, so that little is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "MIN_PROMPT_BUCKET", 128)
        yield


class Stdin:
    """Standard input of these bytes."""

    def __init__(self, content):
        self.buffer = content if hasattr(content, "readline") else io.BytesIO(content)


@pytest.fixture
def run(chat_model, tmp_path, monkeypatch, capfdbinary):
    """Runs the command: (exit status, stdout, stderr)."""
    monkeypatch.setattr(rf.api, "load", lambda path, **_: chat_model)
    (tmp_path / "config.json").write_text("{}")

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        status = 0
        try:
            command_line.run(decode.main, decode.FLAGS, ("checkpoint",), [f"--checkpoint={tmp_path}", *arguments])
        except SystemExit as caught:
            status = caught.code
        out, err = capfdbinary.readouterr()
        return status, out.decode(), err.decode()

    return run


@pytest.fixture
def run_file(run, tmp_path):
    """Decodes objects to a file: (exit status, output's objects or None, stderr)."""

    def run_file(lines, *arguments):
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        status, out, err = run(f"--input={source}", f"--output={target}", "--batch_size=1", *arguments)
        assert out == ""
        found = [json.loads(line) for line in target.read_bytes().splitlines()] if target.exists() else None
        return status, found, err

    return run_file


@pytest.fixture(scope="module")
def answer_to(chat_model):
    """The library's answer to a conversation."""

    def answer_to(*messages, **options):
        return rf.generate(chat_model, [{"messages": list(messages), **options}], batch_size=1).text[0]

    return answer_to


@pytest.fixture
def thinking(chat_model, monkeypatch):
    """The chat template writes whether to think."""

    def render(self, messages, *, add_generation_prompt, enable_thinking):
        return f"{messages[-1]['content']}{add_generation_prompt}{enable_thinking}"

    monkeypatch.setattr(type(chat_model.tokenizer), "render", render)


# ---- one prompt ----------------------------------------------------------------------------------------------------


def test_one_prompt_is_a_users_message(run, answer_to):
    status, out, err = run("--chat", "--prompt=Hi 😀")
    assert (status, out) == (0, answer_to(USER) + "\n")
    assert "per forward]" in err
    assert run("--chat", "--prompt=Hi 😀", "--system=Be brief.")[1] == answer_to(SYSTEM, USER) + "\n"
    assert answer_to(USER) != answer_to(SYSTEM, USER)
    assert run("--prompt=Hi 😀")[1] not in (out, "")


def test_whether_one_prompt_is_thought_about(run, chat_model, thinking):
    texts = rf.generate(chat_model, ["HiTrueTrue", "HiTrueFalse"], batch_size=1).text
    assert run("--chat", "--prompt=Hi")[1] == texts[0] + "\n"
    assert run("--chat", "--prompt=Hi", "--noenable_thinking")[1] == texts[1] + "\n"
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt=x", "--system=y"], "--system needs --chat: only conversations have a system message."),
        (["--input=x", "--output=y", "--system=z"], "--system needs --chat: only conversations have"),
        (["--prompt=x", "--noenable_thinking"], "--enable_thinking and --noenable_thinking need --chat with --prompt"),
        (["--prompt=x", "--chat", "--prefix=y"], "--prefix cannot be used with --chat: it would stand before the conv"),
        (["--chat", "--prompt=x", "--input=y", "--output=z"], "Give either --prompt or --input."),
        (["--chat", "--output=z"], "--input and --output belong together"),
        (["--chat", "--trace=z"], "--trace needs a file of prompts; give --input and --output."),
        (["--chat", "--num_processes=2"], "--num_processes needs a file of prompts; give --input and --output."),
        (["--chat", "--prompt=x", "--system=\udc80"], "--system cannot be used: The conversation, message 1: "),
    ],
)
def test_flags_that_do_not_fit(arguments, sentence, run):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: " + sentence) and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--prompt=x"], [], ["--input=x", "--output=y"]])
def test_a_model_without_tokenizer(arguments, run, chat_model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rf.api, "load", lambda path, **_: dataclasses.replace(chat_model, tokenizer=None))
    status, out, err = run("--chat", *arguments)
    assert (status, out) == (2, "")
    assert err == (
        "error: --chat needs a tokenizer, which the model does not have; give lists of token IDs without it.\n"
    )


# ---- files ---------------------------------------------------------------------------------------------------------


def test_lines_with_messages_are_answered(run_file, answer_to, chat_model):
    """Beside others; what else is in their objects stays."""
    lines = [{"id": 1, "messages": [SYSTEM, USER]}, {"prompt": "Hi 😀"}, {"segments": ["x", {"hole": 3}]}]
    status, found, err = run_file(lines)
    assert status == 0, err
    assert found[0] == lines[0] | {"response": answer_to(SYSTEM, USER), "finish_reason": found[0]["finish_reason"]}
    assert found[1]["response"] == rf.generate(chat_model, ["Hi 😀"], batch_size=1).text[0]
    assert found[2]["response"].startswith("x")


def test_an_output_of_conversations_fed_in_again(run_file, answer_to):
    lines = [{"messages": [USER], "response": "old", "finish_reason": "stop"}]
    assert run_file(lines)[1][0]["response"] == answer_to(USER)


def test_with_chat_prompts_are_conversations_too(run_file, answer_to):
    lines = [
        {"prompt": "Hi 😀"},
        {"messages": [USER]},
        {"messages": [{"role": "system", "content": "Be kind."}, USER]},
        {"prompt": [5, 6]},
        {"segments": ["x", {"hole": 3}]},
    ]
    status, found, _ = run_file(lines, "--chat", "--system=Be brief.")
    assert status == 1
    expected = [answer_to(SYSTEM, USER)] * 2 + [answer_to(lines[2]["messages"][0], USER)]
    assert [each["response"] for each in found[:3]] == expected
    assert found[3]["error"] == "'prompt' must be text with --chat, the user's message; or give 'messages'."
    assert found[4]["error"] == "'segments' are no conversation; give 'messages', or leave out --chat."


def test_a_line_may_say_whether_to_think(run_file, chat_model, thinking):
    lines = [{"messages": [USER]}, {"messages": [USER], "enable_thinking": True},
             {"messages": [USER], "enable_thinking": "no"}]  # fmt: skip
    _, found, _ = run_file(lines, "--noenable_thinking")
    texts = rf.generate(chat_model, ["Hi 😀TrueFalse", "Hi 😀TrueTrue"], batch_size=1).text
    assert [each["response"] for each in found[:2]] == texts
    assert found[2]["error"] == "'enable_thinking' is \"no\"; it must be true or false."


def test_messages_that_cannot_be_used(run_file):
    lines = [
        {"messages": [USER], "prompt": "x"},
        {"messages": [USER], "segments": ["x"]},
        {"messages": "Hi"},
        {"messages": []},
        {"messages": [USER, {"role": "bot", "content": "x"}]},
        {"messages": [USER, ASSISTANT]},
        {"message": [USER]},
    ]
    status, found, _ = run_file(lines)
    assert status == 1
    errors = [each["error"] for each in found]
    assert [each["line"] for each in found] == [1, 2, 3, 4, 5, 6, 7]
    assert errors[0] == "There are both 'prompt' and 'messages'; give one of them."
    assert errors[1] == "There are both 'segments' and 'messages'; give one of them."
    assert errors[2].startswith("The conversation: ") and errors[3].startswith("The conversation: ")
    assert errors[4].startswith("The conversation, message 2: the role is ")
    assert errors[5].startswith("The conversation, message 2: the last message is the assistant's")
    assert errors[6] == "There is no 'prompt' here, no 'messages' and no 'segments'; fields: message."


def test_a_prompt_field_called_messages(run_file, answer_to, chat_model):
    status, found, _ = run_file([{"messages": [USER]}, {"messages": "Hi 😀"}], "--prompt_field=messages")
    assert status == 0
    assert found[0]["response"] == answer_to(USER)
    assert found[1]["response"] == rf.generate(chat_model, ["Hi 😀"], batch_size=1).text[0]


def test_a_prefix_before_a_conversation(run_file):
    status, found, _ = run_file([{"messages": [USER]}, {"prompt": "x"}], "--prefix=y")
    assert status == 1
    assert found[0]["error"].startswith("A shared prefix would stand before the conversation's beginning")
    assert "response" in found[1]


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        (["--chat"], "chat False, not True"),
        (["--noenable_thinking"], "enable_thinking True, not False"),
    ],
)
def test_an_output_of_other_settings_is_refused(arguments, difference, run_file):
    lines = [{"prompt": "Hi"}]
    assert run_file(lines)[0] == 0
    status, _, err = run_file(lines, *arguments)
    assert status == 2 and f"belongs to a run with {difference}; delete it" in err


def test_an_output_of_another_system_message_is_refused(run_file):
    lines = [{"prompt": "Hi"}]
    run_file(lines, "--chat", "--system=Be brief.")
    status, _, err = run_file(lines, "--chat", "--system=Be kind.")
    assert status == 2 and "belongs to a run with system 'Be brief.', not 'Be kind.'; delete it" in err


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.model", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json",
    ],
)  # fmt: skip
def test_an_output_of_another_checkpoint_is_refused(name, run_file, tmp_path):
    lines = [{"prompt": "Hi"}]
    run_file(lines)
    (tmp_path / name).write_text("new")
    status, _, err = run_file(lines)
    assert status == 2 and "belongs to a run with checkpoint_content " in err


# ---- standard input ------------------------------------------------------------------------------------------------


def jsonl(*objects):
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in objects)


def test_lines_of_standard_input_are_answered(run, answer_to):
    lines = jsonl(
        {"messages": [SYSTEM, USER], "id": 1}, b"", {"prompt": "Hi 😀"}, b"nonsense", {"messages": [ASSISTANT]}
    )
    status, out, err = run("--chat", stdin=lines)
    assert (status, err) == (1, "")
    first, second, third, fourth = map(json.loads, out.splitlines())
    assert first["response"] == answer_to(SYSTEM, USER) and first["id"] == 1
    assert first.keys() == {"messages", "id", "response", "finish_reason"}
    assert second == {"prompt": "Hi 😀", "response": answer_to(USER), "finish_reason": second["finish_reason"]}
    assert third["line"] == 4 and third["error"].startswith("Not JSON in UTF-8: ")
    assert fourth["line"] == 5 and "the last message is the assistant's" in fourth["error"]
    assert "😀" in out  # as it is, not escaped
    assert run("--chat", stdin=jsonl({"prompt": "Hi 😀"}))[0] == 0
    assert run("--chat", stdin=b"") == (0, "", "")


def test_several_answers_to_a_line(run):
    status, out, _ = run("--chat", "--num_samples=2", "--temperature=2.0", stdin=jsonl({"prompt": "Hi"}))
    found = json.loads(out)
    assert status == 0 and len(set(found["responses"])) == 2 and len(found["finish_reasons"]) == 2


def test_a_line_may_have_settings_of_its_own(run, answer_to, chat_model):
    lines = jsonl({"messages": [USER], "decode": {"gen_length": 8}}, {"messages": [USER], "decode": {"gen_length": 0}})
    status, out, _ = run("--chat", stdin=lines)
    first, second = map(json.loads, out.splitlines())
    config = dataclasses.replace(chat_model.decode, gen_length=8)
    assert first["response"] == rf.generate(chat_model, [{"messages": [USER]}], config).text[0]
    assert (status, second["error"]) == (1, "decode.gen_length is 0; it must be a number of at least 1.")


class Conversation:
    """Standard input that notes what has been answered whenever a question is asked."""

    def __init__(self, questions, read):
        self.questions, self.read, self.answers = iter(questions), read, []

    def readline(self, size):
        self.answers.append(self.read())
        return next(self.questions, b"")


def test_each_line_is_answered_before_the_next_is_read(run, capfdbinary):
    questions = [jsonl({"prompt": f"question {number}"}) for number in range(3)]
    stdin = Conversation(questions, lambda: capfdbinary.readouterr().out)
    status, out, _ = run("--chat", stdin=stdin)
    assert (status, out) == (0, "")
    assert stdin.answers[0] == b""
    answers = [json.loads(each) for each in stdin.answers[1:]]
    assert [each["prompt"] for each in answers] == ["question 0", "question 1", "question 2"]
    assert all("response" in each for each in answers)


def test_lines_of_similar_lengths_share_one_program(run):
    run("--chat", stdin=jsonl({"prompt": "Hi"}))
    before = refusion.decode_loop._cache_size()
    run("--chat", stdin=jsonl(*({"prompt": "Hi" + "!" * count} for count in range(6))))
    assert refusion.decode_loop._cache_size() == before


def test_an_interruption_lets_the_answer_finish(run, monkeypatch):
    real = decode.generate_stream

    def interrupted(*arguments, **keywords):
        os.kill(os.getpid(), signal.SIGINT)
        yield from real(*arguments, **keywords)

    monkeypatch.setattr(decode, "generate_stream", interrupted)
    status, out, err = run("--chat", stdin=jsonl({"prompt": "Hi"}, {"prompt": "Bye"}))
    assert (status, err) == (130, "Interrupted.\n")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["Hi"]


def test_standard_output_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(rf.ConfigError, match="Standard output is closed"), files.writing_out():
        pytest.fail("went on")

    def full(text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=full))
    expected = pytest.raises(rf.ConfigError, match=r"cannot be written \(No space left on device\)")
    with expected, files.writing_out():
        print("x")


def test_standard_input_that_is_closed(chat_model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(rf.api, "load", lambda path, **_: chat_model)
    with pytest.raises(rf.ConfigError, match="Standard input is closed; give lines there, or --prompt or --input"):
        decode.main(command_line.parse(["--checkpoint=x", "--chat"], decode.FLAGS))


def test_thinking_is_for_conversations(run_file):
    lines = [{"prompt": "Hi", "enable_thinking": False}, {"segments": ["a", {"hole": 4}], "enable_thinking": True}]
    status, found, _ = run_file(lines)
    assert status == 1
    assert found[0]["error"].startswith("'enable_thinking' is for conversations, not for 'prompt'")
    assert found[1]["error"].startswith("'enable_thinking' is for conversations, not for 'segments'")
