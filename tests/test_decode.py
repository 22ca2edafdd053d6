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
    """Decodes lines of input to a new file: (exit status, output's objects or None, stderr)."""

    def run_file(lines, *arguments, **keywords):
        folder = tmp_path / f"run{len(os.listdir(tmp_path))}"
        folder.mkdir()
        source, target = folder / "in.jsonl", folder / "out.jsonl"
        source.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        status, out, err = run(f"--input={source}", f"--output={target}", "--batch_size=4", *arguments, **keywords)
        assert out == ""
        written = ["out.jsonl", "out.jsonl.journal"] if target.exists() else []
        assert sorted(os.listdir(folder)) == ["in.jsonl", *written]
        return status, read(target) if written else None, err

    return run_file


def read(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def expected(tiny_run):
    """The answers of the library."""
    return dict(zip(PROMPTS, api.generate(api.load(tiny_run), PROMPTS, batch_size=4).text, strict=True))


def test_one_prompt_prints_the_response_alone(run, expected):
    status, out, err = run(f"--prompt={PROMPTS[1]}")
    assert status == 0
    assert out == expected[PROMPTS[1]] + "\n"
    assert "per forward]" in err


def test_weights_and_buffer_in_int8(run, run_file):
    types = ["--quantize=int8", "--kv_dtype=int8"]
    status, out, err = run("--prompt=S:7+1?", *types)
    assert status == 0 and "tokens in" in err
    status, objects, _ = run_file(['{"prompt": "S:7+1?"}'], *types)
    assert status == 0 and objects[0]["response"] == out.removesuffix("\n")


@pytest.mark.parametrize("types", [["--quantize=int8"], ["--kv_dtype=int8"], ["--dtype=bfloat16"]])
def test_an_output_of_other_types_is_not_continued(types, run, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "S:7+1?"}\n')
    arguments = [f"--input={source}", f"--output={target}", "--batch_size=4"]
    assert run(*arguments)[0] == 0
    status, _, err = run(*arguments, *types)
    name, value = types[0].removeprefix("--").split("=")
    assert status == 2 and f"{name} None, not {value!r}" in err


@pytest.mark.parametrize(("flag", "known"), [("quantize", "int8"), ("kv_dtype", "int8"), ("dtype", "bfloat16")])
def test_types_that_are_not_known(flag, known, run):
    status, _, err = run("--prompt=S:7+1?", f"--{flag}=int4")
    assert status == 2 and known in err and err.count("\n") == 1


def test_a_file_keeps_order_and_fields(run_file, expected):
    lines = [{"id": i, "prompt": prompt, "note": "ü"} for i, prompt in enumerate(PROMPTS)]
    status, objects, err = run_file([json.dumps(line, ensure_ascii=False) for line in lines])
    assert status == 0
    assert objects == [line | {"response": expected[line["prompt"]], "finish_reason": "length"} for line in lines]
    assert "4 prompts answered, 0 lines with errors. This run: 64 response tokens in " in err


def test_bad_lines_are_reported_and_good_ones_answered(run_file, expected):
    bad = {
        2: ("{'prompt': 1}", "Not JSON in UTF-8: "),
        4: ('["S:1?"]', 'A JSON object was expected, not ["S:1?"].'),
        5: (
            '{"text": "S:1?", "id": 7}',
            "There is no 'prompt' here, no 'messages' and no 'segments'; fields: text, id.",
        ),
        6: ('{"prompt": 7}', "'prompt' must be text or a list of token IDs, which are whole"),
        7: ('{"prompt": null}', "'prompt' must be text or a list of token IDs, which are whole"),
        8: ('{"prompt": [5, 1.5]}', "'prompt' must be text or a list of token IDs, which are whole"),
        9: ('{"prompt": [true]}', "'prompt' must be text or a list of token IDs, which are whole"),
        11: ('{"prompt": ""}', "The prompt is empty"),
        12: ('{"prompt": []}', "The prompt is empty"),
        13: (json.dumps({"prompt": "R:" + "a" * 200, "id": 8}), "The prompt has 202 tokens"),
        14: ('{"prompt": [5, -1]}', "Prompt token -1 lies outside the vocabulary"),
        15: ("{}", "There is no 'prompt' here, no 'messages' and no 'segments'; fields: none."),
        16: ('{"prompt": "S:1?", "a": NaN}', "A number is not finite or too long"),
        17: ('{"prompt": "S:1?", "decode": {"slot_threshold": 1e400}}', "A number is not finite or too long"),
        18: ('{"prompt": "S:1?", "decode": {"temperature": 1e300}}', "decode.temperature is 1e+300; above 1000"),
    }
    good = {1: PROMPTS[0], 3: PROMPTS[1], 10: PROMPTS[2]}
    lines = [json.dumps({"prompt": good[n]}) if n in good else bad[n][0] for n in range(1, 19)]
    status, objects, err = run_file(lines)
    assert status == 1
    assert "3 prompts answered, 15 lines with errors" in err
    for number, found in enumerate(objects, 1):
        if number in good:
            assert found == {
                "prompt": good[number],
                "response": expected[good[number]],
                "finish_reason": "length",
            }
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
    assert objects[0]["error"].startswith(("A text has half a surrogate pair", "A number is not finite or too long"))
    assert [found["response"] for found in objects[1:]] == list(expected.values())


def test_a_field_called_error_is_no_error(run_file, expected):
    status, objects, _ = run_file([json.dumps({"prompt": prompt, "error": None}) for prompt in PROMPTS])
    assert status == 0
    assert [(found["response"], found["error"]) for found in objects] == [(text, None) for text in expected.values()]


def test_an_output_fed_in_again_carries_nothing_over(run_file, expected):
    (prompt, text), *_ = expected.items()
    lines = [
        {"prompt": prompt, "line": 7, "error": "old"},
        {"prompt": "", "response": "stale", "finish_reason": "eos", "responses": [], "finish_reasons": []},
    ]
    status, objects, _ = run_file(list(map(json.dumps, lines)))
    assert status == 1
    assert objects[0] == {"prompt": prompt, "response": text, "finish_reason": "length"}
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

    monkeypatch.setattr(api, "load", lambda path, **_: dataclasses.replace(model, tokenizer=None))
    status, objects, _ = run_file([*lines, '{"prompt": "S:1?"}'])
    assert status == 1
    assert [model.tokenizer.decode(found["response"]) for found in objects[:4]] == list(expected.values())
    assert objects[4]["error"] == "The model has no tokenizer; give prompts as lists of token IDs."


@pytest.mark.parametrize("flag", ["data_parallel", "tensor_parallel"])
def test_more_devices_than_there_are_end_with_one_line_and_status_2(run, flag):
    status, out, err = run("--prompt=S:1?", f"--{flag}=1000")
    assert (status, out) == (2, "")
    assert err.startswith("error: --data_parallel") and err.count("\n") == 1
    assert f"--{flag} 1000" in err and "cannot be had of" in err


def test_a_text_prompt_for_a_model_without_tokenizer(run, tiny_run, monkeypatch):
    model = dataclasses.replace(api.load(tiny_run), tokenizer=None)
    monkeypatch.setattr(api, "load", lambda path, **_: model)
    status, out, err = run("--prompt=S:1?")
    assert (status, out) == (2, "")
    assert err == "error: The model has no tokenizer; give prompts as lists of token IDs.\n"


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
        (
            ["--prompt=x", "--trace=t"],
            "--trace needs a file of prompts; give --input and --output instead of --prompt.",
        ),
        (["--prompt=x", "--num_processes=2"], "--num_processes needs a file of prompts"),
        (
            ["--input=x", "--output=y", "--trace=./y"],
            "--output and --trace are both y; choose another file for --trace",
        ),
        (["--input=x", "--output=./x"], "--input and --output are both x; choose another file for --output."),
        (
            ["--input=x", "--output=y", "--process_id=1"],
            "--process_id is given without --num_processes; processes that",
        ),
        (
            ["--input=x", "--output=y", "--num_processes=2", "--process_id=2", "--coordinator_address=localhost:1"],
            "--process_id is 2; with --num_processes=2 it must lie in [0, 2).",
        ),
        (
            ["--input=x", "--output=y", "--num_processes=2", "--process_id=1", "--coordinator_address=localhost"],
            "--coordinator_address is 'localhost'; give HOST:PORT",
        ),
        (["--prompt=x", "--batch_size=0"], "flag --batch_size=0: it must be at least 1, or auto"),
        (["--prompt=x", "--batch_size=all"], "flag --batch_size=all: it must be at least 1, or auto"),
        (["--prompt=x", "--num_samples=0"], "flag --num_samples=0"),
        (["--prompt=x", "--slot_score=best"], "flag --slot_score=best"),
        (["--prompt=x", "--suppress_ids=3,b"], "--suppress_ids is '3,b'; give whole numbers, separated by commas."),
        (["--prompt=x", "--prefix=" + "a" * 200], "The prefix has 200 tokens, which leaves no room"),
        (["--prompt=x", "--stop="], "decode.stop holds an empty text"),
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
    monkeypatch.setattr(api, "load", lambda path, **_: pytest.fail("loaded"))
    (tmp_path / "directory").mkdir()
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "S:1?"}\n')
    status, _, err = run(f"--input={source}", f"--output={tmp_path}/{output}")
    assert status == 2
    assert f"error: --output {tmp_path}/{output} cannot be written: " in err
    assert sorted(os.listdir(tmp_path)) == ["directory", "in.jsonl"]


def test_several_responses_to_one_prompt(run, expected):
    status, out, err = run(f"--prompt={PROMPTS[0]}", "--num_samples=2", "--batch_size=2")
    assert status == 0
    assert out == 2 * (expected[PROMPTS[0]] + "\n")
    assert err.startswith("[32 tokens in ")


def test_segments_and_a_trace(run_file, tiny_run, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"segments": ["S:", {"hole": 3}, "+1?"]}, {"segments": ["S:1+1?"], "id": 5}, {"segments": [{"hole": 2}]}]
    status, objects, _ = run_file(map(json.dumps, lines), f"--trace={trace}")
    assert status == 1
    (hole,) = objects[0]["holes"]
    assert objects[0] == lines[0] | {"response": f"S:{hole}+1?", "holes": [hole], "finish_reason": "length"}
    assert (objects[1]["response"], objects[1]["holes"]) == ("S:1+1?", [])
    assert objects[2]["error"] == "The template has no fixed text; give at least one token."
    first, second = read(trace)
    assert api.load(tiny_run).tokenizer.decode(first["tokens"]) == hole
    assert (first["line"], first["sample"], first["position_ids"]) == (1, 0, [2, 3, 4])
    assert len(first["iteration"]) == len(first["probability"]) == 3
    assert all(0 <= probability <= 1 for probability in first["probability"])
    assert (second["line"], second["tokens"]) == (2, [])
