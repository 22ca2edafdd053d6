"""The decode command: one prompt, files of prompts with good and bad lines, and settings as flags."""

import dataclasses
import json
import os

import pytest

from refusion_jax import api, command_line, decode

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPTS = ["S:7+1+7+5?", "R:abc?", "Q:12,7?", "A:klmn?"]


@pytest.fixture(autouse=True)
def same_allocator(monkeypatch):
    monkeypatch.setattr(decode, "keep_freed_memory", lambda: None)


@pytest.fixture
def run(tiny_run, capsys):
    """Runs the command with the tiny run's checkpoint: (exit status, stdout, stderr)."""

    def run(*arguments, checkpoint=tiny_run):
        status = 0
        try:
            command_line.run(
                decode.main, decode.FLAGS, ("checkpoint",), [f"--checkpoint={checkpoint}", *map(str, arguments)]
            )
        except SystemExit as caught:
            status = caught.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def run_file(run, tmp_path):
    """Decodes lines of input: (exit status, output's objects or None, stderr)."""

    def run_file(lines, *arguments, **keywords):
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        status, out, err = run(f"--input={source}", f"--output={target}", "--batch_size=4", *arguments, **keywords)
        assert out == ""
        assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in (source, target) if path.exists())
        objects = [json.loads(line) for line in target.read_bytes().splitlines()] if target.exists() else None
        return status, objects, err

    return run_file


@pytest.fixture(scope="module")
def expected(tiny_run):
    """The answers of the library."""
    return dict(zip(PROMPTS, api.generate(api.load(tiny_run), PROMPTS, batch_size=4).text, strict=True))


def test_one_prompt_prints_the_response_alone(run, expected):
    status, out, err = run(f"--prompt={PROMPTS[1]}")
    assert status == 0
    assert out == expected[PROMPTS[1]] + "\n"
    assert "per forward]" in err


def test_a_file_keeps_order_and_fields(run_file, expected):
    lines = [{"id": i, "prompt": prompt, "note": "ü"} for i, prompt in enumerate(PROMPTS)]
    status, objects, err = run_file([json.dumps(line, ensure_ascii=False) for line in lines])
    assert status == 0
    assert objects == [line | {"response": expected[line["prompt"]]} for line in lines]
    assert "4 prompts answered, 0 lines with errors" in err
    assert "4/4 prompts" in err


def test_bad_lines_are_reported_and_good_ones_answered(run_file, expected):
    bad = {
        2: ("{'prompt': 1}", "Not JSON in UTF-8: "),
        4: ('["S:1?"]', "A JSON object was expected, not list."),
        5: ('{"text": "S:1?", "id": 7}', "'prompt' must be text or token IDs; fields here: text, id."),
        6: ('{"prompt": 7}', "'prompt' must be text or token IDs"),
        7: ('{"prompt": null}', "'prompt' must be text or token IDs"),
        8: ('{"prompt": [5, 1.5]}', "'prompt' must be text or token IDs"),
        9: ('{"prompt": [true]}', "'prompt' must be text or token IDs"),
        11: ('{"prompt": ""}', "The prompt is empty"),
        12: ('{"prompt": []}', "The prompt is empty"),
        13: (json.dumps({"prompt": "R:" + "a" * 200, "id": 8}), "The prompt has 202 tokens"),
        14: ('{"prompt": [5, -1]}', "Prompt token -1 lies outside the vocabulary"),
        15: ("{}", "'prompt' must be text or token IDs; fields here: none."),
    }
    good = {1: PROMPTS[0], 3: PROMPTS[1], 10: PROMPTS[2]}
    lines = [json.dumps({"prompt": good[n]}) if n in good else bad[n][0] for n in range(1, 16)]
    status, objects, err = run_file(lines)
    assert status == 1
    assert "3 prompts answered, 12 lines with errors" in err
    for number, found in enumerate(objects, 1):
        if number in good:
            assert found == {"prompt": good[number], "response": expected[good[number]]}
        else:
            assert found["line"] == number
            assert found["error"].startswith(bad[number][1])
            assert "response" not in found
    assert (objects[4]["id"], objects[12]["id"]) == (7, 8)


def test_blank_lines_are_skipped_and_counted(run_file, expected):
    lines = ["", json.dumps({"prompt": PROMPTS[0]}), "   ", "{", json.dumps({"prompt": PROMPTS[1]}), "{}", ""]
    status, objects, _ = run_file([*lines, json.dumps({"prompt": PROMPTS[2]})])
    assert status == 1
    assert [found.get("line") for found in objects] == [None, 4, None, 6, None]
    assert [found.get("response") for found in objects if "prompt" in found] == [expected[p] for p in PROMPTS[:3]]


@pytest.mark.parametrize(
    "line",
    [
        r'{"prompt": "\ud800"}',
        r'{"prompt": "S:1?", "note": "\ud800"}',
        "[" * 100_000,
        '{"prompt": [' + "9" * 5_000 + "]}",
    ],
    ids=["half a surrogate pair", "half a pair in another field", "nested too deeply", "too long a number"],
)
def test_lines_that_parsers_give_up_on(line, run_file, expected):
    status, objects, _ = run_file([line, *(json.dumps({"prompt": prompt}) for prompt in PROMPTS)])
    assert status == 1
    assert objects[0]["line"] == 1
    assert objects[0]["error"].startswith("Not JSON in UTF-8: ")
    assert [found["response"] for found in objects[1:]] == list(expected.values())


def test_a_field_called_error_is_no_error(run_file, expected):
    status, objects, _ = run_file([json.dumps({"prompt": prompt, "error": None}) for prompt in PROMPTS])
    assert status == 0
    assert [(found["response"], found["error"]) for found in objects] == [(text, None) for text in expected.values()]


def test_an_output_fed_in_again_carries_nothing_over(run_file, expected):
    (prompt, text), *_ = expected.items()
    lines = [{"prompt": prompt, "line": 7, "error": "old"}, {"prompt": "", "response": "stale"}]
    status, objects, _ = run_file(list(map(json.dumps, lines)))
    assert status == 1
    assert objects[0] == {"prompt": prompt, "response": text}
    assert objects[1].keys() == {"prompt", "line", "error"}


def test_a_byte_order_mark_is_skipped(run_file, expected):
    first, *rest = (json.dumps({"prompt": prompt}) for prompt in PROMPTS)
    status, objects, _ = run_file(["\ufeff" + first, *rest])
    assert status == 0
    assert [found["response"] for found in objects] == list(expected.values())


def test_lines_end_at_line_feeds_alone(run_file, expected):
    """JSON text may hold other line separators as they are; lines may end in CR LF."""
    lines = [json.dumps({"prompt": p, "note": "a\u2028b\x85c"}, ensure_ascii=False) + "\r" for p in PROMPTS]
    status, objects, _ = run_file(lines)
    assert status == 0
    assert [(found["response"], found["note"]) for found in objects] == [
        (response, "a\u2028b\x85c") for response in expected.values()
    ]


def test_no_lines_give_an_empty_file(run_file):
    status, objects, err = run_file([])
    assert (status, objects) == (0, [])
    assert "0 prompts answered" in err


def test_prompt_field(run_file, expected):
    lines = [json.dumps({"question": prompt, "prompt": "other"}) for prompt in PROMPTS[:3]]
    status, objects, _ = run_file(lines, "--prompt_field=question")
    assert status == 0
    assert [found["response"] for found in objects] == [expected[prompt] for prompt in PROMPTS[:3]]


def test_token_prompts_with_and_without_tokenizer(run_file, tiny_run, expected, monkeypatch):
    model = api.load(tiny_run)
    lines = [json.dumps({"prompt": model.tokenizer.encode(prompt)}) for prompt in PROMPTS]
    _, objects, _ = run_file(lines)
    assert [found["response"] for found in objects] == list(expected.values())

    monkeypatch.setattr(decode, "load", lambda path: dataclasses.replace(model, tokenizer=None))
    status, objects, _ = run_file([*lines, '{"prompt": "S:1?"}'])
    assert status == 1
    assert [model.tokenizer.decode(found["response"]) for found in objects[:4]] == list(expected.values())
    assert objects[4]["error"] == "The model has no tokenizer; give prompts as lists of token IDs."


def test_a_text_prompt_for_a_model_without_tokenizer(run, tiny_run, monkeypatch):
    monkeypatch.setattr(decode, "load", lambda path: dataclasses.replace(api.load(tiny_run), tokenizer=None))
    status, out, err = run("--prompt=S:1?")
    assert (status, out) == (2, "")
    assert err == "error: The model has no tokenizer; give prompts as lists of token IDs.\n"


def test_settings_are_flags_over_those_of_the_run(run_file, monkeypatch):
    seen = []

    def generate(model, prompts, config, **keywords):
        seen.append((config, keywords["seed"], keywords["batch_size"]))
        return api.Generation([[1]] * len(prompts), [""] * len(prompts), [], [], [1], [], [])

    monkeypatch.setattr(decode, "generate", generate)
    lines = ['{"prompt": "S:1?"}']
    run_file(lines)
    run_file(lines, "--gen_length=32", "--slot_size=8", "--serial_num_blocks=4", "--redraft", "--temperature=0.5",
             "--algorithm=paper", "--token_threshold=0", "--suppress_special", "--seed=5")  # fmt: skip
    default = seen[0][0]
    assert (default.gen_length, default.slot_size, default.serial_num_blocks) == (16, 4, 2)
    changed = dataclasses.replace(
        default, gen_length=32, slot_size=8, serial_num_blocks=4, redraft=True, temperature=0.5, algorithm="paper",
        token_threshold=0.0, suppress_special=True,
    )  # fmt: skip
    assert seen == [(default, 0, 4), (changed, 5, 4)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Give either --prompt or --input."),
        (["--prompt=x", "--input=y", "--output=z"], "Give either --prompt or --input."),
        (["--input=y"], "--input and --output belong together"),
        (["--prompt=x", "--output=z"], "--input and --output belong together"),
        (["--prompt=S:1?", "--token_threshold=1.5"], "decode.token_threshold is 1.5; a probability threshold must lie"),
        (["--prompt=S:1?", "--gen_length=20"], "decode.gen_length 20 is 5 slots of 4, which 2 serial blocks cannot"),
        (["--prompt=S:1?", "--gen_length=0"], "decode.gen_length is 0; it must be a number of at least 1."),
        (["--prompt=S:1?", "--algorithm=papre"], "Did you mean 'paper'?"),
        (["--prompt=S:1?", "--gen_length=many"], "flag --gen_length=many"),
        (["--prompt="], "The prompt is empty; give at least one token."),
        (["--prompt=" + "a" * 200], "The prompt has 200 tokens"),
        (["--prompt=x", "--seed=-1"], "flag --seed=-1"),
        (["--prompt=x", "--seed=99999999999"], "flag --seed=99999999999"),
        (["--prompts=x"], "Unknown flag '--prompts'. Did you mean '--prompt'?"),
    ],
)
def test_what_cannot_be_used_ends_with_one_line_and_status_2(arguments, sentence, run):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_a_checkpoint_that_is_none(run, tmp_path):
    status, _, err = run("--prompt=S:1?", checkpoint=tmp_path / "nothing")
    assert status == 2
    assert "nothing is not a directory; give a run directory" in err


def test_a_line_that_is_not_utf8(run, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'{"prompt": "S:1?\xff"}\n')
    assert run(f"--input={source}", f"--output={target}")[0] == 1
    found = json.loads(target.read_text())
    assert found["line"] == 1
    assert found["error"].startswith("Not JSON in UTF-8: ")


def test_an_input_that_cannot_be_read(run, tmp_path):
    status, _, err = run(f"--input={tmp_path}/in.jsonl", f"--output={tmp_path}/out.jsonl")
    assert status == 2
    assert err.startswith(f"error: --input {tmp_path}/in.jsonl cannot be read: ")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("output", ["nowhere/out.jsonl", "directory"])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(output, run, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "generate", lambda *arguments, **keywords: pytest.fail("decoded"))
    (tmp_path / "directory").mkdir()
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "S:1?"}\n')
    status, _, err = run(f"--input={source}", f"--output={tmp_path}/{output}")
    assert status == 2
    assert f"error: --output {tmp_path}/{output} cannot be written: " in err
    assert sorted(os.listdir(tmp_path)) == ["directory", "in.jsonl"]


def test_a_write_that_fails_leaves_nothing(run, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(decode.os, "replace", full)
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    status, _, err = run(f"--input={source}", f"--output={tmp_path}/out.jsonl")
    assert status == 2
    assert "No space left on device" in err
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_a_failed_run_leaves_an_earlier_output_alone(run, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    target.write_text("earlier\n")
    status, _, _ = run(f"--input={source}", f"--output={target}")
    assert status == 2
    assert target.read_text() == "earlier\n"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_output_may_be_the_input(run, tmp_path, expected):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    assert run(f"--input={path}", f"--output={path}", "--batch_size=4")[0] == 0
    assert [json.loads(line)["response"] for line in path.read_text().splitlines()] == list(expected.values())
