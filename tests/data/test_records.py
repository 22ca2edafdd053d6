import gzip
import json

import pytest

from refusion_jax.data.records import DataError, Example, ReadCounts, read_examples

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
