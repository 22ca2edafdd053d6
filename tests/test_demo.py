"""The demo: its figures from a known generation, and a whole call on the tiny run."""

import dataclasses
import json
import shutil
import types

import pytest

from refusion_jax import command_line, demo
from refusion_jax.config import DecodeConfig
from refusion_jax.data import Example
from refusion_jax.data.synthetic import held_out_examples

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEYS = {"prompts", "exact_match", "tokens_per_forward", "exact_match_by_task", "paper", "decode_seconds", "seconds"}
EXAMPLES = [
    Example("R:abcd?", "a>b>c>d."),
    Example("Q:5,6?", "5,6,7,8,9,10."),
    Example("R:dcba?", "d>c>b>a."),
    Example("A:klm?", "kkkkllllmmmm=mlk."),
    Example("R:aaaa?", "a>a>a>a."),
]
TEXTS = ["a>b>c>d.", "5,6,7,8,9,10.", "d>c>b>b.", "kkkkllllmmmm=mlk", "a>a>a>a."]
EOS, PAD = 1, 0


def encode(text):
    return list(map(ord, text))


MODEL = types.SimpleNamespace(tokenizer=types.SimpleNamespace(encode=encode, eos_token_id=EOS))
GENERATION = types.SimpleNamespace(
    # The fourth reads right up to its missing end and has a pad before it; the last is right, but did not end.
    tokens=[*([*encode(text), EOS] for text in TEXTS[:3]), [*encode(TEXTS[3]), PAD, EOS], encode(TEXTS[4])],
    text=TEXTS,
    order=[[0] * 4 + [1] * 5, [0] * 13 + [40], [0] * 9, [2] * 17 + [3], [1] * 8],
    forwards=[2, 5, 1, 4, 3],
)


@pytest.fixture
def generated(monkeypatch):
    monkeypatch.setattr(demo, "generate", lambda model, prompts, config, batch_size: GENERATION)


def test_exact_match_and_tokens_per_forward(generated):
    result, score = demo.evaluate(MODEL, EXAMPLES, DecodeConfig(), batch_size=16)
    assert result is GENERATION
    assert score.exact_match == 2 / 5
    assert score.by_task == {"R": 1 / 3, "Q": 1.0, "A": 0.0}
    assert score.tokens_per_forward == (9 + 14 + 9 + 18 + 8) / 15
    assert score.seconds >= 0


def test_answers_are_shown_once_per_task_with_the_forward_of_each_character(capsys):
    demo._print_answers(EXAMPLES, GENERATION)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[1:] == [
        "R:abcd?", "a>b>c>d.", "00001111",
        "Q:5,6?", "5,6,7,8,9,10.", "0" * 13,
        "A:klm?", "kkkkllllmmmm=mlk", "2" * 16,
    ]  # fmt: skip


def test_marks():
    assert demo._marks([0, 9, 10, 35, 36, 400]) == "09az++"


def test_the_whole_demo(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "keep_freed_memory", lambda: None)
    run = shutil.copytree(tiny_run, tmp_path / "run")
    trained = json.loads((run / "summary.json").read_text())
    configs, examples = [], held_out_examples(0, 4)
    evaluate = demo.evaluate

    def watched(model, given, config, batch_size):
        assert (given, batch_size) == (examples, 4)
        configs.append(config)
        return evaluate(model, given, config, batch_size)

    monkeypatch.setattr(demo, "evaluate", watched)
    command_line.run(demo.main, demo.FLAGS, arguments=[f"--checkpoint={run}", "--prompts=4", "--batch_size=4"])
    assert [config.algorithm for config in configs] == ["self_correcting", "paper"]
    assert dataclasses.replace(configs[0], algorithm="paper") == configs[1]

    summary = json.loads((run / "summary.json").read_text())
    assert summary.keys() == trained.keys() | KEYS
    assert {name: summary[name] for name in trained if name not in KEYS} == {
        name: trained[name] for name in trained if name not in KEYS
    }
    assert 0 <= summary["exact_match"] <= 1
    assert summary["exact_match_by_task"].keys() == set("RSQA")
    assert summary["paper"].keys() == {"exact_match", "tokens_per_forward"}
    assert summary["seconds"] == pytest.approx(trained["train_seconds"] + summary["decode_seconds"])
    out = capsys.readouterr().out
    assert "Decoding 4 prompts that training never saw, slots of 4 tokens:" in out
    assert f"decode.py --checkpoint={run}" in out
    assert all(example.prompt in out for example in examples)


@pytest.mark.parametrize("count", [0, -3])
def test_no_prompts_are_refused(count, tiny_run, capsys):
    with pytest.raises(SystemExit) as caught:
        command_line.run(demo.main, demo.FLAGS, arguments=[f"--checkpoint={tiny_run}", f"--prompts={count}"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: --prompts is {count}; decode at least one.\n"


def test_other_data_is_refused(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "keep_freed_memory", lambda: None)
    run = shutil.copytree(tiny_run, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["data"] |= {"source": "json", "train_files": ["a.jsonl"]}
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as caught:
        command_line.run(demo.main, demo.FLAGS, arguments=[f"--checkpoint={run}"])
    assert caught.value.code == 2
    assert "was trained on 'json' data; the demo's tasks are 'synthetic'." in capsys.readouterr().err
