import gzip
import json

import pytest

from refusion_jax.config import DataConfig
from refusion_jax.data.examples import DataError, Example, ReadCounts
from refusion_jax.data.records import read_entry, read_examples

ROWS = [{"query": "a\u2028b", "response": "c\nd"}, {"query": "e", "response": "f", "more": 1}]
EXAMPLES = [Example("a\u2028b", "c\nd"), Example("e", "f")]


def lines(rows):
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)


@pytest.mark.parametrize(
    "text",
    [
        lines(ROWS),
        "\n  \n" + lines(ROWS) + "\n\n",
        lines(ROWS).replace("\n", "\r\n"),
        json.dumps(ROWS),
        "\ufeff\n " + json.dumps(ROWS, indent=2),
    ],
    ids=["lines", "blank lines", "CRLF", "list", "indented list with BOM"],
)
@pytest.mark.parametrize("compress", [False, True])
def test_reads_lines_and_lists_by_content(tmp_path, text, compress):
    file = tmp_path / "data.txt"
    file.write_bytes(gzip.compress(text.encode()) if compress else text.encode())
    assert read_examples([str(file)], "query", "response") == (EXAMPLES, ReadCounts(read=2))


def test_reads_files_in_order_and_counts_blank_ones(tmp_path):
    first, second = tmp_path / "1.jsonl", tmp_path / "2.json"
    first.write_text(lines([{"p": " \n", "r": ""}, {"p": "1", "r": "one"}, {"p": "x", "r": "\t"}]))
    second.write_text(json.dumps([{"p": "2", "r": " two "}, {"p": "", "r": "y"}]))
    examples, counts = read_examples([str(first), str(second)], "p", "r")
    assert examples == [Example("1", "one"), Example("2", " two ")]
    assert counts == ReadCounts(read=5, empty_prompt=2, empty_response=1)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (lines(ROWS) + '\n{"query": ', ["line 3", "expected JSON", "column"]),
        (
            '{"query": "a", "response": "b"}\n\n{"query": "a", "answer": "b"}',
            ["line 3", "'response'", "'query', 'answer'"],
        ),
        ('[{"query": "a", "response": "b"}, {"query": "a"}]', ["item 2", "'response'", "'query'"]),
        ('[{"query": "a", "response": "b"},\n {"query": }]', ["line 2", "expected JSON"]),
        ('{"query": "a", "response": 7}', ["line 1", "'response'", "string", "7"]),
        ('{"query": null, "response": "b"}', ["line 1", "'query'", "string", "null"]),
        ('["a"]', ["item 1", "object", '"a"']),
        ("{}", ["line 1", "'query'", "none"]),
        ('{"query": "\\ud800", "response": "b"}', ["line 1", "'query'", "surrogate"]),
        (b'{"query": "\xff"}', ["UTF-8", "offset 11"]),
        (gzip.compress(b"{}", mtime=0)[:-4], ["cannot be read"]),
        (b"\x1f\x8bnothing", ["cannot be read"]),
        ("[" * 100_000, ["line 1", "nested too deeply"]),
    ],
)
def test_refuses_bad_files_in_one_sentence(tmp_path, content, parts):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as error:
        read_examples([str(file)], "query", "response")
    message = str(error.value)
    assert message.startswith(str(file)) and "\n" not in message and len(message) < len(str(file)) + 200
    assert all(part in message for part in parts), message


def test_refuses_a_missing_file_and_a_directory(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl: there is no such file"):
        read_examples([str(tmp_path / "nowhere.jsonl")], "query", "response")
    with pytest.raises(DataError, match="cannot be read"):
        read_examples([str(tmp_path)], "query", "response")


def chat(*turns):
    return {"messages": [dict(zip(("role", "content"), turn, strict=True)) for turn in turns]}


def read(path, rows, **fields):
    path.write_text(lines(rows))
    return read_entry(DataConfig(source="json", train_files=(str(path),), **fields), str(path))


def test_the_last_assistant_turn_is_the_response_or_each_of_them(tmp_path):
    rows = [
        chat(("system", "s"), ("user", "1"), ("assistant", "one"), ("user", "2"), ("assistant", "two"), ("user", "3")),
        chat(("user", "4"), ("assistant", " ")),
        chat(("assistant", "hello")),
    ]
    first = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"
    second = first + "one<|im_end|>\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"
    greeting = Example("<|im_start|>assistant\n", "hello")
    last = read(tmp_path / "a", rows, format="messages")
    assert last == ([Example(second, "two"), greeting], ReadCounts(read=3, empty_response=1))
    every = read(tmp_path / "a", rows, format="messages", turns="all")
    assert every == ([Example(first, "one"), Example(second, "two"), greeting], ReadCounts(read=3, empty_response=1))


def test_documents_have_no_prompt_and_blank_ones_are_counted(tmp_path):
    rows = [{"body": "one\n"}, {"body": " \n"}, {"body": "two"}]
    expected = [Example("", "one\n"), Example("", "two")], ReadCounts(read=3, empty_response=1)
    assert read(tmp_path / "a", rows, format="text", text_field="body") == expected


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        (chat(("user", "a")), ["line 2: none of the 1 messages is from the assistant"]),
        (chat(), ["line 2: the list of messages is empty"]),
        (chat(("user", "a"), ("robot", "b")), ['line 2, message 2: the role is "robot"', "system, user, assistant"]),
        (chat(("user", "a"), ("system", "b"), ("assistant", "c")), ["line 2, message 2", "must be the conversation's"]),
        (chat(("user", ["a"]), ("assistant", "c")), ["line 2, message 1", "'content'", "string", '["a"]']),
        (chat(("user", "a"), ("assistant", None)), ["line 2, message 2", "'content'", "null"]),
        ({"messages": [{"role": "user"}]}, ["line 2, message 1", "'content'", "'role'"]),
        ({"messages": ["hello"]}, ["line 2, message 1", "object", '"hello"']),
        ({"messages": "hello"}, ["line 2", "list of messages", '"hello"']),
        ({"turns": []}, ["line 2", "'messages'", "'turns'"]),
    ],
)
def test_refuses_malformed_conversations(tmp_path, row, parts):
    file = tmp_path / "chats.jsonl"
    with pytest.raises(DataError) as error:
        read(file, [chat(("user", "a"), ("assistant", "b")), row], format="messages")
    message = str(error.value)
    assert message.startswith(str(file)) and "\n" not in message
    assert all(part in message for part in parts), message


def test_refuses_documents_without_text(tmp_path):
    with pytest.raises(DataError, match="line 1: expected the field 'text' to be a string, but found 3"):
        read(tmp_path / "a", [{"text": 3}], format="text")
