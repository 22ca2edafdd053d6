"""The benchmarks' arithmetic, tables and protocols; nothing here measures anything worth telling."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import (
    common,
    compiling,
    decode,
    gpu,
    gpu_decoding,
    gpu_parts,
    loading,
    loss,
    tokenizing,
    train,
    yardstick,
)
from refusion_jax.config import ConfigError, ModelConfig
from refusion_jax.modeling import Transformer

OURS = train.Turn(seconds=2.0, tokens=3000, step_seconds=[0.5, 0.5, 1.0], waited=0.1, page_faults=10)
THEIRS = train.Turn(seconds=4.0, tokens=3000, step_seconds=[2.0, 2.0])


def test_flops_of_the_demo_model():
    per_layer = 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384
    expected = 6 * (3 * per_layer + 128 * 64) + 3 * 3 * (2 * 2 * 128 * 96)
    assert train.flops_per_token(ModelConfig(vocab_size=64), row_length=96) == expected


def test_summary_compares_within_rounds():
    faster = train.Turn(seconds=1.0, tokens=3000, step_seconds=[0.25, 0.75])
    rounds = [train.Round([4e9, 8e9], OURS, THEIRS), train.Round([4e9, 8e9], faster, THEIRS)]
    summary = train.summarise(rounds, flops=1_000_000)
    assert summary["ratio"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert summary["tokens_per_second"] == {"median": 2250.0, "min": 1500.0, "max": 3000.0}
    assert summary["step_ms"] == {"median": 500.0, "min": 250.0, "max": 1000.0}
    assert summary["tokens_per_step"] == 1200
    assert summary["page_faults_per_step"] == 2
    assert summary["data_wait_share"] == pytest.approx(0.1 / 3)
    assert summary["matmul"][0]["share_reached"]["max"] == pytest.approx(0.75)
    assert summary["yardstick"]["tokens_per_second"]["median"] == 750.0


def test_tables_have_every_figure():
    measured = train.Round([4e9, 8e9], OURS, THEIRS)
    assert train.round_row(1, measured) == "| 1 | 1,500 | 500.0 | 4 / 8 | 750 | 2000.0 | 2.00 |"
    table = train.summary_table(
        train.summarise([measured], 1_000_000), compile_seconds=7.0, compiled_flops=1.02, peak_rss_mib=1000.0
    )
    assert "| useful tokens per second | 1,500 (1,500 to 1,500) |" in table
    assert "| ratio, ours to the yardstick's | 2.00 (2.00 to 2.00) |" in table


def test_tables_without_the_yardstick():
    measured = train.Round([4e9, 8e9], OURS)
    summary = train.summarise([measured], 1_000_000)
    assert "ratio" not in summary and "ratio" not in train.round_record(measured)
    assert train.round_row(1, measured) == "| 1 | 1,500 | 500.0 | 4 / 8 | – | – | – |"
    assert "yardstick" not in train.summary_table(summary, 7.0, 1.02, 1000.0)


def test_a_checkpoint_to_load(tmp_path):
    config = loading.make_config(512, gigabytes=0.02)
    assert (config.num_hidden_layers, config.num_key_value_heads) == (2, 1)
    assert loading.make_config(4096, gigabytes=4).num_hidden_layers == 9
    loading.write_checkpoint(tmp_path, config, shards=3)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert loading.measure(tmp_path)["seconds"] > 0
    with pytest.raises(ConfigError, match="--hidden_size is 700, not a multiple of 512; use 512"):
        loading.make_config(700, gigabytes=1)


def test_yardstick_batches_are_padded_to_the_longest():
    tokens, mask = yardstick.padded([2, 5, 3], vocab_size=64)
    assert np.shape(tokens) == (3, 5) and np.max(tokens) < 64
    assert mask == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_yardstick_measures_at_least_the_seconds_asked_for():
    turn = train.Turn(**yardstick.measure(lambda: 10, 0.01))
    assert turn.seconds >= 0.01
    assert turn.tokens == 10 * len(turn.step_seconds)
    assert sum(turn.step_seconds) == pytest.approx(turn.seconds)


def interpreter_that_answers(path, *answers):
    """Writes an executable that stands in for a Python: it answers each line it reads with the next answer."""
    path.write_text(f"#!{sys.executable}\nfor answer in {[json.dumps(a) for a in answers]!r}:\n")
    with path.open("a") as file:
        file.write("    input()\n    print(answer, flush=True)\n")
    path.chmod(0o755)
    return str(path)


def test_yardstick_protocol(tmp_path):
    turn = {"seconds": 4.0, "tokens": 3000, "step_seconds": [2.0, 2.0]}
    python = interpreter_that_answers(tmp_path / "python", {"versions": {"torch": "2"}}, turn)
    process = common.Yardstick(python, "yardstick.py", {"model": train.yardstick_model(ModelConfig(vocab_size=64))})
    assert process.versions == {"torch": "2"}
    assert train.Turn(**process.ask(4.0)) == THEIRS
    process.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [("python", "pip install torch transformers"), ("none", "not start"), ("ends", "exit status 3")],
)
def test_yardstick_says_what_is_missing(tmp_path, name, message):
    interpreter_that_answers(tmp_path / "python", {"error": "No module named 'torch'"})
    (tmp_path / "ends").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "ends").chmod(0o755)
    with pytest.raises(ConfigError, match=message):
        common.Yardstick(str(tmp_path / name), "yardstick.py", {})


@pytest.mark.parametrize("script", ["train.py", "decode.py", "infilling.py", "tokenizing.py", "gpu.py"])
def test_benchmarks_run_as_scripts(script, tmp_path):
    """From any directory, though a script's own directory is all that Python puts on its path."""
    command = [sys.executable, str(common.HERE / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"benchmarks/{script}" in done.stdout


# ---- tokenizing ----------------------------------------------------------------------------------------------------


def test_conversations_are_repeated_and_tokenized_whole(tmp_path):
    rows = [{"question": f"{i}+{i}?", "answer": f"{2 * i}."} for i in range(3)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    conversations = tokenizing.read_conversations(str(tmp_path / "data.jsonl"), 5)
    assert [turns[1]["content"] for turns in conversations] == ["0.", "2.", "4.", "0.", "2."]
    tokenizer = tokenizing.train_byte_level([turn["content"] for turns in conversations for turn in turns])
    summary = tokenizing.summarise([tokenizing.measure(conversations, tokenizer)] * 2, 5)
    text = tokenizer.render(conversations[0], add_generation_prompt=False, enable_thinking=True)
    assert summary["tokens"] == 5 * len(tokenizer.encode(text.strip()))
    assert summary["seconds"]["median"] >= summary["tokenize_seconds"]["max"]
    (tmp_path / "data.jsonl").write_text("")
    with pytest.raises(ConfigError, match="which has no examples"):
        tokenizing.read_conversations(str(tmp_path / "data.jsonl"), 5)


# ---- decoding ------------------------------------------------------------------------------------------------------

TURNS = [decode.Turn(2.0, 0.5, 1.0, tokens=100, iterations=10, forwards=25)]
TURNS += [decode.Turn(4.0, 0.7, 3.0, tokens=100, iterations=10, forwards=25)]


@pytest.fixture(scope="module")
def cases():
    return decode.read_cases()


def test_decoding_summary_and_row():
    record = decode.summarise(TURNS)
    assert record["tokens_per_second"] == {"median": 37.5, "min": 25.0, "max": 50.0}
    assert record["ms_per_forward"] == {"median": 200.0, "min": 100.0, "max": 300.0}
    assert record["tokens_per_forward"] == 4.0
    assert record["prefill_seconds"] == pytest.approx(0.6)
    row = decode.speed_row(record | {"model": "100m", "batch_size": 4, "decoding": "ReFusion"})
    assert len(row) == len(decode.SPEED_HEADER)
    assert row[:5] == ["100m", "4", "ReFusion", "100", "38 (25 to 50)"]


def test_characters_of_the_recorded_cases(cases):
    ids = decode.vocabulary(cases)
    characters = {c for case in cases for c in case["question"] + case["gold"]}
    assert set(ids) == characters and len(set(ids.values())) == len(ids)
    right = decode.exact_match([decode.response_of(case) for case in cases], decode.golds(cases))
    assert right == pytest.approx(102 / 160)


def test_a_character_has_one_token():
    case = {"question": "ab", "gold": "b", "prompt": [4, 5], "expected": [4, 5, 5, 1]}
    assert decode.vocabulary([case]) == {"a": 4, "b": 5}
    with pytest.raises(ValueError, match="'b' is both token 5 and 6"):
        decode.vocabulary([case, case | {"prompt": [4, 6]}])


def test_responses_end_with_the_first_eos():
    assert decode.through_eos([5, 1, 6, 1]) == [5, 1]
    assert decode.through_eos([5, 6]) == [5, 6]


def test_recorded_calls_are_forwards_of_the_prompts(cases):
    for case in cases:
        rows, length, cached = case["calls"][0]
        assert rows == 1 and cached == 0 and length > len(case["prompt"])


def test_yardstick_table():
    one = {"median": 2.0, "min": 1.0, "max": 3.0}
    ours = {"algorithm": "paper", "batch_size": 16, "exact_match": 0.75, "tokens_per_second": one, "ratio": one}
    table = decode.yardstick_table({"tokens_per_second": one, "exact_match": 0.5, "ours": [ours]})
    assert "| yardstick | 1 | 0.500 | 2 (1 to 3) | 1 |" in table
    assert "| paper | 16 | 0.750 | 2 (1 to 3) | 2.00 (1.00 to 3.00) |" in table


def test_mixed_lengths_differ_widely():
    lengths = decode.mixed_lengths()
    assert (len(lengths), min(lengths), max(lengths)) == (256, 8, 256)
    assert lengths != sorted(lengths)


def test_the_random_model_has_100_million_parameters():
    module, one = Transformer(common.SHAPE_100M), np.zeros((1, 1), np.int32)
    shapes = jax.tree.leaves(jax.eval_shape(module.init, jax.random.key(0), one, one))
    assert 95e6 < sum(leaf.size for leaf in shapes) < 105e6


@pytest.mark.parametrize("sizes", [["0"], ["4", "x"], ["-1"], []])
def test_unusable_batch_sizes(sizes):
    with pytest.raises(ConfigError, match="--batch_sizes"):
        decode.parse_batch_sizes(sizes)
    assert decode.parse_batch_sizes(["1", "16"]) == [1, 16]


def test_unknown_models():
    with pytest.raises(ConfigError, match="'7b'; the models are reference, 100m"):
        common.parse_models(["reference", "7b"])


# ---- the loss --------------------------------------------------------------------------------------------------------


def loss_inputs(**settings):
    given = {"positions": 12, "width": 8, "vocabulary": 20, "targets": 0.5, "dtype": "float32"} | settings
    return loss.make_inputs(SimpleNamespace(**given))


def test_versions_of_the_loss_agree():
    inputs = loss_inputs()
    plain, chunked = loss.compile_version("plain", loss.plain_loss, inputs), loss.chunked_loss(5)
    value, gradients = plain.compiled(*inputs)
    got, ours = loss.compile_version("chunk 5", chunked, inputs).compiled(*inputs)
    assert float(value) > 0.1
    assert float(got) == pytest.approx(float(value), rel=1e-5)
    for a, b in zip(ours, gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_times_are_compared_within_rounds():
    plain, ours = loss.Version("plain", None, 4000, [1.0, 3.0]), loss.Version("chunk 5", None, 500, [0.5, 3.0])
    row = loss.figures(ours, plain, logits_bytes=2000)
    assert row["time_to_plain"] == {"median": 0.75, "min": 0.5, "max": 1.0}
    assert row["share_of_logits"] == 0.25


def test_unusable_chunks():
    with pytest.raises(ConfigError, match="--chunks holds '-1'"):
        loss.parse_chunks(["0", "-1"])
    assert loss.parse_chunks(["0", "64"]) == [0, 64]


# ---- one GPU ---------------------------------------------------------------------------------------------------------

TRIAL = {"what": "8 x 4096, remat full", "batch_size": 8, "length": 4096, "remat": "full"}


def test_a_part_that_fails_or_takes_too_long_is_told_with_what_it_measured(monkeypatch):
    def fails(command, **settings):
        Path(command[4]).write_text(
            json.dumps({"records": [TRIAL | {"skipped": "too large"}], "left_out": ["4 rows", "2 rows"]})
        )
        return SimpleNamespace(returncode=1, stderr="Traceback\nRuntimeError: no GPU\n")

    monkeypatch.setattr(gpu.subprocess, "run", fails)
    part = gpu.run_part("train_0.6b", 9, [])
    assert (part["status"], part["error"]) == ("failed", "RuntimeError: no GPU")
    rows = gpu.rows_of("train_0.6b", part)
    assert rows[0] == ["train_0.6b, 8 x 4096, remat full", "too large", ""]
    assert rows[1][1].startswith("failed after") and rows[1][1].endswith(
        "s: RuntimeError: no GPU; not measured: 4 rows; 2 rows"
    )

    def hangs(command, timeout, **settings):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(gpu.subprocess, "run", hangs)
    assert gpu.run_part("peaks", 9, [])["status"] == "timeout"
    assert "ran out of its time" in gpu.rows_of("peaks", gpu.run_part("peaks", 9, []))[0][1]


def test_a_part_without_the_time_for_all_says_what_it_left_out(monkeypatch):
    def ends(command, **settings):
        Path(command[4]).write_text(json.dumps({"records": [TRIAL | {"skipped": "too large"}], "left_out": ["2 rows"]}))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(gpu.subprocess, "run", ends)
    part = gpu.run_part("train_0.6b", 9, [])
    assert (part["status"], part["left_out"]) == ("incomplete", ["2 rows"])
    told = gpu.rows_of("train_0.6b", part)[-1][1]
    assert told.startswith("had no time left after") and told.endswith("s; not measured: 2 rows")


def run_gpu_part(monkeypatch, path, name, *arguments):
    """Runs a part in this process; what it wrote."""
    monkeypatch.setattr(sys, "argv", ["gpu_parts", name, str(path), "--small", *arguments])
    gpu_parts.main()
    return json.loads(path.read_text())


def pretend_to_measure(monkeypatch, seconds):
    """Replaces what measures by what takes so many seconds of a clock that only it moves."""
    now = [0.0]

    def trial(config, peaks):
        now[0] += seconds
        rows, remat = config.train.batch_size, config.model.remat
        return {"batch_size": rows, "length": config.data.max_length, "remat": remat}

    def way(decoding):
        def measure(module, params, rows, prompt_length):
            now[0] += seconds
            return {"decoding": decoding, "rows": rows, "committed": 8}

        return measure

    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(gpu_parts, "time", clock)
    monkeypatch.setattr(gpu_decoding, "time", clock)
    monkeypatch.setattr(gpu_parts, "measure_trial", trial)
    monkeypatch.setattr(gpu_decoding, "random_params", lambda model: {})
    monkeypatch.setattr(gpu_decoding, "quantize", lambda params: params)
    monkeypatch.setattr(gpu_decoding, "WAYS", {name: way(name) for name in gpu_decoding.WAYS})


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("train_0.6b", ["4 x 128, remat full", "2 x 128, remat full"]),
        ("decode_int8", ["ReFusion, 1 row", "left to right, 1 row", "ReFusion, 4 rows", "left to right, 4 rows"]),
    ],
)
def test_a_part_names_what_it_measures_and_what_it_leaves_out(name, what, tmp_path, monkeypatch):
    pretend_to_measure(monkeypatch, seconds=10.0)
    whole = run_gpu_part(monkeypatch, tmp_path / "whole.json", name, "--seconds=100")
    assert ([record["what"] for record in whole["records"]], whole["left_out"]) == (what, [])
    for record in whole["records"]:
        if "decoding" in record:
            assert record["what"] == gpu_decoding.name_of((record["rows"], record["decoding"]))
        else:
            assert record["what"] == f"{record['batch_size']} x {record['length']}, remat {record['remat']}"
    cut = run_gpu_part(monkeypatch, tmp_path / "cut.json", name, "--seconds=15")
    assert ([record["what"] for record in cut["records"]], cut["left_out"]) == (what[:1], what[1:])


def test_a_part_that_dies_has_named_what_it_was_to_measure(tmp_path, monkeypatch):
    def dies(*arguments):
        raise MemoryError

    monkeypatch.setattr(gpu_decoding, "random_params", dies)
    with pytest.raises(MemoryError):
        run_gpu_part(monkeypatch, tmp_path / "part.json", "decode_int8")
    assert len(json.loads((tmp_path / "part.json").read_text())["left_out"]) == 4


@pytest.fixture
def gpu_limits(monkeypatch):
    """Parts that end at once: the time each was given. What they answer can be set by name."""
    limits, answers = {}, {"about": {"device": "A Card", "versions": {}, "commit": "", "flags": {}}}

    def run_part(name, seconds, arguments):
        limits[name] = seconds
        return {"status": "ok", "seconds": 1.0} | answers.get(name, {})

    monkeypatch.setattr(gpu, "run_part", run_part)
    monkeypatch.setattr(gpu.accelerators, "set_flags", lambda: None)
    return SimpleNamespace(limits=limits, answers=answers)


def test_small_parts_have_more_time(gpu_limits, tmp_path, capsys):
    gpu.main(["--parts=peaks,peaks", f"--output={tmp_path}/new/a.json"])
    assert gpu_limits.limits["peaks"] == gpu.SECONDS["peaks"]
    assert list(json.loads((tmp_path / "new" / "a.json").read_text())["parts"]) == ["peaks"]
    gpu.main(["--small", f"--output={tmp_path}/a.json"])
    assert set(gpu_limits.limits.values()) == {gpu.SMALL_SECONDS}
    assert max(gpu.SECONDS.values()) < gpu.SMALL_SECONDS / 2
    with pytest.raises(SystemExit):
        gpu.main(["--help"])
    assert f"{gpu.SMALL_SECONDS} seconds" in " ".join(capsys.readouterr().out.split())


def test_a_part_that_is_named_twice_is_measured_once():
    assert gpu.parse(["--parts=train_0.6b,peaks,train_0.6b"]).parts == ["train_0.6b", "peaks"]


@pytest.mark.parametrize("status", ["failed", "timeout", "incomplete"])
def test_the_exit_status_is_1_when_not_all_was_measured(status, gpu_limits, tmp_path):
    gpu_limits.answers["peaks"] = {"status": status}
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--parts=peaks,train_0.6b", f"--output={tmp_path}/a.json"])
    assert ended.value.code == 1
    parts = json.loads((tmp_path / "a.json").read_text())["parts"]
    assert [part["status"] for part in parts.values()] == [status, "ok"]


def run_gpu_script(monkeypatch, *arguments):
    """Runs gpu.py as a script in this process, with Ctrl-C pressed in its first part; its exit status."""

    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    monkeypatch.setattr(gpu.accelerators, "set_flags", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(common.HERE / "gpu.py"), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("output", ["", "/dev/null", "/proc/x/y.json", "file/a.json", "a" * 300])
def test_a_result_that_cannot_be_written_is_refused_before_anything_is_measured(output, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    assert run_gpu_script(monkeypatch, f"--output={tmp_path / output}") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "give another --output." in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_ctrl_c_ends_the_benchmark_in_one_word(tmp_path, monkeypatch, capsys):
    assert run_gpu_script(monkeypatch, f"--output={tmp_path}/a.json") == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_the_parts_take_less_than_six_minutes():
    assert sum(gpu.SECONDS.values()) < 350


def test_the_fastest_trial_is_marked():
    times = {"step_seconds": {"median": 0.5}, "utilisation_of_measured": 0.5, "utilisation_of_data_sheet": None}
    records = [TRIAL | times | {"tokens_per_second": rate} for rate in (10.0, 20.0)] + [TRIAL | {"skipped": "no"}]
    gpu.mark_fastest(records)
    assert [record["fastest"] for record in records] == [False, True, False]
    rows = gpu.rows_of("train_0.6b", {"status": "ok", "records": records})
    assert rows[1][1] == "fastest: 500.0 ms, 20 tokens/s, 50.0% of the measured peak"
    gpu.mark_fastest(records[1:])  # of one there is no fastest
    assert not records[1]["fastest"]


@pytest.mark.parametrize(("width", "query"), [(1, "1 token,"), (16, "16 tokens,")])
def test_a_row_of_decoding_counts_in_singular_and_plural(width, query):
    record = {
        "what": gpu_decoding.name_of((width, "ReFusion")), "forward_seconds": {"median": 0.002}, "query_width": width,
        "bound_seconds": None, "tokens_per_second": 500.0, "tokens_per_forward": 1.0, "committed": 8,
    }  # fmt: skip
    (row,) = gpu.rows_of("decode_int8", {"status": "ok", "records": [record]})
    assert row[0].endswith(", 1 row" if width == 1 else ", 16 rows")
    assert row[1].startswith(f"2.00 ms/forward of {query}")


@pytest.mark.parametrize("tied", [False, True])
def test_a_forward_reads_all_weights_but_those_of_a_mere_lookup(tied):
    model = ModelConfig(vocab_size=64, tie_word_embeddings=tied)
    params = gpu_decoding.random_params(model)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert gpu_decoding.read_bytes(params) == total - (0 if tied else 4 * 64 * model.hidden_size)


@pytest.mark.slow
def test_forwards_commit_the_stated_number_of_tokens():
    model = ModelConfig(vocab_size=64, num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    module, params = Transformer(model), gpu_decoding.random_params(model)
    record = gpu_decoding.measure_refusion(module, params, 2, 16)
    assert record["tokens_per_forward"] == gpu_decoding.SLOT
    assert record["query_width"] == 2 * gpu_decoding.SLOT
    assert record["tokens_per_second"] == pytest.approx(2 * 8 / record["forward_seconds"]["median"])


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path):
    output = tmp_path / "small.json"
    parts = "peaks,train_0.6b,decode_int8_kv"
    command = ["sh", str(common.HERE / "gpu.sh"), "--small", f"--parts={parts}", f"--output={output}"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    result = json.loads(output.read_text())
    assert [part["status"] for part in result["parts"].values()] == ["ok"] * 3
    for part in parts.split(","):
        assert f"| {part}" in done.stdout


def compiled_decode(monkeypatch, per_layer):
    """What `compiling.decoding` makes of a command whose figures grow with the depth."""

    def result(script, topology, *arguments):
        depth = 4 if "--config.model.num_hidden_layers=4" in arguments else 36
        memory = {"parameters": 1000 + 50 * depth, "KV buffer": 10 * depth}
        forward = {"bytes_per_chip": 5000 + per_layer * depth, "memory": memory, "compile_seconds": 1.0}
        command = " ".join([script, *arguments, topology])
        return {"command": command, "fits": True, "hbm_limit_bytes": 1, "programs": {"decode forward": forward}}

    monkeypatch.setattr(compiling, "compiled", result)
    return compiling.decoding("v6e:2x4", "--quantize=int8")


def test_what_a_layer_moves_is_a_difference_of_depths(monkeypatch):
    wide, narrow = (compiled_decode(monkeypatch, per_layer) for per_layer in (90e6, 30e6))
    assert (wide["bytes_per_layer"], wide["held_per_layer"]) == (90e6, 60)
    assert "--quantize=int8" in wide["command"] and "num_hidden_layers" not in wide["command"]
    wide["held_per_layer"] = 60e6
    table = compiling.decoding_table({"wide": wide, "narrow": narrow})
    assert "| wide | 90.0 | 1.500 | 3,240 | 1 |" in table
    assert "| narrow | 30.0 | 0.500 | 1,080 | 1 |" in table


def test_a_training_case_is_a_row():
    result = {
        "mesh": {"data": 4, "fsdp": 16, "tensor": 1}, "hbm_bytes_per_chip": 40e9, "hbm_limit_bytes": 100e9,
        "flops_ratio": 1.0042, "collectives_ratio": 0.9751, "utilisation": 0.996, "compile_seconds": 75.2,
    }  # fmt: skip
    table = compiling.training_table({"two rows": result})
    assert "| two rows | 4 x 16 x 1 | 40.0 of 100.0 | 60% | 1.004 | 0.975 | 99.6% | 75 |" in table


def test_cases_are_named_by_a_part():
    assert list(compiling.chosen({"training, 2 rows": (), "decoding": ()}, ["2 rows", "3"])) == ["training, 2 rows"]
    assert len(compiling.chosen(compiling.TRAINING, None)) == len(compiling.TRAINING)


def test_a_command_that_fails_says_why(monkeypatch):
    done = SimpleNamespace(returncode=2, stdout="", stderr="error: no such TPU.\n")
    monkeypatch.setattr(compiling.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ConfigError, match=r"train.py --compile_for=v9:2x2 failed: error: no such TPU\."):
        compiling.compiled("train.py", "v9:2x2")
