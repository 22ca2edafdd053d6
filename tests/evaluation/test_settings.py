"""How each benchmark is decoded."""

import pytest

from refusion_jax.config import ConfigError, DecodeConfig
from refusion_jax.evaluation import settings
from refusion_jax.evaluation.settings import EvalConfig, decode_config, eval_configs, find_eval_config

PAPER = {  # slot size, blocks, thresholds
    "gsm8k": (32, 4, 0.9, 0.4),
    "math": (32, 8, 0.8, 0.6),
    "mbpp": (32, 4, 0.9, 0.3),
    "humaneval": (32, 4, 0.9, 0.4),
    "gpqa": (8, 32, 0.8, 0.2),
    "arc_challenge": (8, 64, 0.8, 0.1),
    "mmlu_pro": (16, 4, 0.9, 0.4),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_settings(name):
    config = eval_configs()[name].decode
    found = config.slot_size, config.serial_num_blocks, config.slot_threshold, config.token_threshold
    assert (config.gen_length, found) == (512, PAPER[name])


@pytest.mark.parametrize(
    "task, name",
    [
        ("gsm8k", "gsm8k"),
        ("gsm8k_cot_zeroshot", "gsm8k"),
        ("hendrycks_math_algebra", "math"),
        ("minerva_math500", "math"),
        ("mbpp_instruct", "mbpp"),
        ("humaneval_instruct", "humaneval"),
        ("gpqa_main_generative_n_shot", "gpqa"),
        ("arc_challenge_chat", "arc_challenge"),
        ("mmlu_pro_law", "mmlu_pro"),
    ],
)
def test_tasks_of_the_harness_find_theirs(task, name):
    assert find_eval_config(task)[0] == name


@pytest.mark.parametrize("task", ["arc_easy", "mmlu", "hellaswag", "my_gsm8k"])
def test_other_tasks_find_none(task):
    assert find_eval_config(task) is None


def test_the_longest_pattern_wins(monkeypatch):
    configs = {name: EvalConfig(tasks=(tasks,)) for name, tasks in (("a", "gsm*"), ("b", "gsm8k*"), ("c", "g*"))}
    monkeypatch.setattr(settings, "eval_configs", lambda: configs)
    assert find_eval_config("gsm8k")[0] == "b"


def test_a_file_of_the_working_directory_wins(tmp_path, monkeypatch):
    (tmp_path / "configs" / "eval").mkdir(parents=True)
    text = (
        "from refusion_jax.evaluation.settings import EvalConfig\ndef get_config(): return EvalConfig(tasks=('mine',))"
    )
    (tmp_path / "configs" / "eval" / "gsm8k.py").write_text(text)
    (tmp_path / "configs" / "eval" / "wrong.py").write_text("")
    monkeypatch.chdir(tmp_path)
    eval_configs.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"wrong\.py has no get_config\(\) that returns an EvalConfig"):
            eval_configs()
        (tmp_path / "configs" / "eval" / "wrong.py").unlink()
        assert eval_configs()["gsm8k"].tasks == ("mine",)
        assert eval_configs()["mbpp"].tasks == ("mbpp*",)
    finally:
        eval_configs.cache_clear()


def test_overrides_win_over_the_file_and_the_file_over_the_checkpoint():
    default = DecodeConfig(gen_length=16, slot_size=4, redraft=True)
    asked = {"until": ["\n\n", "Q:"], "max_gen_toks": 100}
    config = decode_config("gsm8k", default, {"slot_threshold": 0.5}, asked, True)
    assert (config.gen_length, config.slot_size, config.slot_threshold, config.redraft) == (512, 32, 0.5, False)
    assert config.stop == ("\n\n", "Q:")
    config = decode_config("gsm8k", default, {"gen_length": 96, "serial_num_blocks": 1, "stop": ("!",)}, asked, True)
    assert (config.gen_length, config.stop) == (96, ("\n\n", "Q:", "!"))


def test_without_a_file_the_harness_says_how_long_responses_are():
    default = DecodeConfig(gen_length=24, slot_size=4, serial_num_blocks=3, temperature=0.5)
    assert decode_config("other", default, {}, {"max_gen_toks": 100}, True).gen_length == 108  # whole blocks
    assert decode_config("other", default, {}, {}, True).gen_length == 24
    assert decode_config("other", default, {"gen_length": 12}, {"max_gen_toks": 100}, True).gen_length == 12
    assert decode_config("gsm8k", default, {}, {"max_gen_toks": 10}, False).gen_length == 12


def test_the_harness_says_what_is_sampled():
    asked = {"do_sample": True, "temperature": 1, "top_p": 0.95, "top_k": 5, "until": "stop"}
    config = decode_config("other", DecodeConfig(), {}, asked, True)
    assert (config.temperature, config.top_p, config.top_k, config.stop) == (1.0, 0.95, 5, ("stop",))
    greedy = decode_config("other", DecodeConfig(temperature=0.5), {}, asked | {"do_sample": False}, True)
    assert (greedy.temperature, greedy.top_p) == (0.0, 1.0)


def test_settings_that_do_not_go_together_are_refused_by_the_tasks_name():
    with pytest.raises(ConfigError, match=r"Task gsm8k: decode.gen_length 96 is 3 slots of 32, which 4 serial blocks"):
        decode_config("gsm8k", DecodeConfig(), {"gen_length": 96}, {}, True)


def test_settings_for_no_task_are_refused():
    with pytest.raises(ConfigError, match=r"eval\.tasks is empty"):
        EvalConfig()
