"""The runs of the comparison: what they have in common, and what not."""

import dataclasses

import numpy as np
import pytest

from benchmarks import compare
from benchmarks.compare_ablations import ablation_settings, curve_settings
from benchmarks.compare_cells import Cells
from benchmarks.compare_decoding import SETTINGS, Outcome, Setting, choose
from benchmarks.compare_systems import (
    ABLATIONS,
    LONGER,
    PRESETS,
    RATES,
    TRAINING,
    base_config,
    gsm8k_config,
    system_config,
)
from refusion_jax import command_line
from refusion_jax.config import DecodeConfig, to_dict
from refusion_jax.data import load_dataset, make_batches
from refusion_jax.methods import Method

TINY = PRESETS["tiny"]
NAMES = [*TRAINING, *ABLATIONS]


@pytest.fixture(scope="module")
def datasets():
    tokenizer = load_dataset(base_config(TINY, 0).data, seed=1_000).tokenizer
    configs = {name: system_config(TINY, 0, name, "base", TINY.steps) for name in TRAINING}
    return configs, {
        name: load_dataset(config.data, seed=config.train.seed, tokenizer=tokenizer) for name, config in configs.items()
    }


def test_all_systems_see_the_same_examples_in_the_same_batches(datasets):
    configs, found = datasets
    seen = {}
    for name, dataset in found.items():
        config = configs[name]
        batches = make_batches(config.data, dataset.train, seed=config.train.seed, batch_size=config.train.batch_size)
        steps = []
        for step in range(config.train.steps):
            batch = batches[step]
            texts = []
            for row, prompt, response in zip(
                batch["tokens"], *batch["prompt_lengths"].T, *batch["response_lengths"].T, strict=True
            ):
                eos = dataset.tokenizer.eos_token_id
                tokens = row[: prompt + response].tolist()
                texts.append(tokens[: tokens.index(eos) + 1])
            steps.append(texts)
        seen[name] = steps
    assert len({str(steps) for steps in seen.values()}) == 1
    assert len({str(text) for text in seen["llada"][0]}) == TINY.batch_size


def test_nothing_is_too_long(datasets):
    for dataset in datasets[1].values():
        assert dataset.counts.train.too_long == 0 and len(dataset.held_out) == TINY.validation + TINY.test


@pytest.mark.parametrize("name", NAMES)
def test_runs_differ_only_in_what_makes_the_system(name):
    ours, other = (to_dict(system_config(TINY, 0, each, "base", TINY.steps)) for each in (name, "refusion"))
    differing = {
        f"{section}.{field}"
        for section, values in ours.items()
        for field, value in values.items()
        if value != other[section][field]
    }
    assert differing <= {
        "train.objective", "data.pad_responses", "slots.sizes", "slots.clean_order", "slots.ar_weight",
    }  # fmt: skip
    assert bool(differing) == (name != "refusion")


def test_base_sees_other_examples():
    base, system = base_config(TINY, 0), system_config(TINY, 0, "autoregressive", "base", TINY.steps)
    first, second = (load_dataset(each.data, seed=each.train.seed) for each in (base, system))
    assert not np.array_equal(first.train.tokens[:500], second.train.tokens[:500])
    assert {base_config(TINY, seed).train.seed for seed in range(3)}.isdisjoint(
        system_config(TINY, seed, "llada", "", TINY.steps).train.seed for seed in range(3)
    )


@pytest.mark.parametrize("name", TRAINING)
def test_gsm8k_runs(name):
    config = gsm8k_config(TINY, name, "train.jsonl")
    assert config.train.objective == TRAINING[name]["train"]["objective"] and not config.train.init_from
    assert config.data.train_files == ("train.jsonl",) and config.data.pad_responses == 16


def test_every_setting_can_be_decoded():
    ablations = [ablation_settings(name) for name in ["refusion", *ABLATIONS]]
    for settings in [*SETTINGS.values(), curve_settings(), *ablations]:
        texts = [str(dataclasses.asdict(setting)) for setting in settings]
        assert len(set(texts)) == len(texts)
        for setting in settings:
            config, method = DecodeConfig(**setting.decode), Method(**setting.method)
            if method.name != "refusion":
                method.blocks(config.gen_length)
            assert setting.trained in TRAINING


def test_systems_are_tried_with_the_same_number_of_settings():
    counts = {name: len(settings) for name, settings in SETTINGS.items()}
    assert counts.pop("autoregressive") == 1
    assert counts.pop("fast_dllm") == 24  # of two systems' weights
    assert set(counts.values()) == {12}


def test_the_fastest_of_the_best_is_chosen():
    def tried(name, exact_match, tokens_per_forward):
        loads = [{"kind": "whole", "width": 64, "cached": 0, "count": 1}]
        found = Outcome(100, exact_match, {}, tokens_per_forward, loads)
        return Setting({"name": name, "gen_length": 64}, {}, "llada"), found

    # One standard error of the best, 0.9 of 100 prompts, is 0.03.
    found = [tried("good", 0.9, 1.0), tried("faster", 0.871, 2.0), tried("worse", 0.869, 9.0)]
    assert choose(found).decode["name"] == "faster"
    assert choose(found[::2]).decode["name"] == "good"


# ---- the script ----------------------------------------------------------------------------------------------------


def run_script(*arguments):
    command_line.run(compare.main, compare.FLAGS, arguments=[f"--{argument}" for argument in arguments])


def test_all_cells_are_listed(tmp_path, capsys):
    run_script("preset=tiny", f"workdir={tmp_path}", "gsm8k=", "list")
    listed = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(set(listed)) == len(listed)
    training = {place.removeprefix("train/") for place in listed if place.startswith("train/")}
    assert training == {
        *(f"{name}_{seed}" for name in ["base", *TRAINING] for seed in range(TINY.seeds)),
        *(f"{name}_0" for name in ABLATIONS),
        *(f"long_{name}_0" for name in LONGER),
        *(f"rate_{rate:g}_{name}_0" for name in TRAINING for rate in RATES),
        "llada_from_random_0",
    }
    assert {f"decode/search_{name}" for name in SETTINGS} < set(listed)
    assert {"dependence/llada_0", "mechanisms/refusion_0"} < set(listed)


def test_tests_are_listed_when_settings_are_chosen(tmp_path, capsys):
    comparison = compare.Comparison(TINY, tmp_path, "")
    cells = Cells(tmp_path, allow_dirty=True)
    for name, cell in comparison.searches.items():
        loads = [{"kind": "whole", "width": 64, "cached": 0, "count": 1}]
        tried = {"prompts": 1, "exact_match": 1.0, "by_task": {}, "tokens_per_forward": 1.0, "loads": loads}
        found = [{"setting": dataclasses.asdict(SETTINGS[name][0]), "outcome": tried}]
        cells.run_cell(dataclasses.replace(cell, compute=lambda _, found=found: found))
    run_script("preset=tiny", f"workdir={tmp_path}", "gsm8k=", "list")
    listed = {line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()[2:]}
    tests = {f"decode/test_{name}_{seed}" for name in SETTINGS for seed in range(TINY.seeds)}
    others = {f"decode/test_{name}_long_{name}" for name in LONGER} | {"decode/test_llada_llada_from_random"}
    assert tests | others | {f"timing/{name}" for name in SETTINGS} < listed


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("only=train/bert_*", "--only train/bert_* is no cell's place; --list tells them."),
        ("gsm8k=none.jsonl", "--gsm8k none.jsonl is no file; give that of GSM8K's training problems, or '' for none."),
    ],
)
def test_what_the_script_refuses(argument, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run_script("preset=tiny", f"workdir={tmp_path}", "gsm8k=", argument)
    assert end.value.code == 2 and message in capsys.readouterr().err
