"""The train command, on a run directory that is already trained: the run itself is tested where the loop is."""

import shutil

import pytest

from refusion_jax import command_line, train

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def run(tiny_config, tmp_path, monkeypatch, capsys):
    """Runs the command with the tiny run's configuration as preset: (exit status, stdout, stderr)."""
    monkeypatch.setattr(train, "keep_freed_memory", lambda: None)
    preset = tmp_path / "preset.py"
    preset.write_text(
        "from refusion_jax.command_line import config_dict\n"
        "from refusion_jax.config import *\n"
        f"def get_config():\n    return config_dict({tiny_config!r})\n"
    )

    def run(*arguments):
        status = 0
        try:
            command_line.run(train.main, train.FLAGS, ("workdir",), [f"--config={preset}", *map(str, arguments)])
        except SystemExit as caught:
            status = caught.code
        return status, *capsys.readouterr()

    return run


def test_the_configuration_and_directory_reach_the_loop(run, tiny_run, tmp_path):
    workdir = shutil.copytree(tiny_run, tmp_path / "run")
    status, out, _ = run(f"--workdir={workdir}")
    assert status == 0
    assert f"{workdir} has already been trained for 20 steps." in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config.train.steps=30"], "(train.steps is 20 there and 30 here)"),
        (["--config.data.max_length=8"], "None of the 300 examples can be used"),
        (["--config.model.vocab_size=20"], "model.vocab_size is 20, too small for the tokenizer's"),
        (["--config.train.seed=2147483648"], "train.seed is 2147483648; it must be below 2**31."),
        (["--config.mesh.fsdp=3"], "mesh.data 1 x mesh.fsdp 3 x mesh.tensor 1 does not make 1 devices"),
        (["--config.optimizer.warmup_steps=500"], "optimizer.warmup_steps is 500, more than train.steps (20)"),
    ],
)
def test_what_cannot_be_used_ends_with_one_line_and_status_2(arguments, sentence, run, tiny_run):
    status, out, err = run(f"--workdir={tiny_run}", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_a_work_directory_is_required(run):
    status, _, err = run()
    assert status == 2
    assert "--workdir is missing" in err
