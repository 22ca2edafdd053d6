"""What a user can type, and what is said when it cannot be understood."""

import configparser
import dataclasses
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from absl import flags
from ml_collections import ConfigDict

from refusion_jax import command_line, config, config_files
from refusion_jax.config import Config, ConfigError, DataConfig, OptimizerConfig, SlotsConfig
from refusion_jax.modeling import Transformer

ROOT = Path(__file__).parents[1]
PRESETS = sorted((ROOT / "configs").glob("*.py"))
SECTIONS = [section.name for section in dataclasses.fields(Config)]
LEAVES = [f"{s}.{field.name}" for s in SECTIONS for field in dataclasses.fields(getattr(Config(), s))]


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def command_flags():
    values = flags.FlagValues()
    command_line.define_config(values)
    flags.DEFINE_string("workdir", None, "Directory of the run.", flag_values=values)
    flags.DEFINE_integer("rows", 8, "Rows of a batch.", flag_values=values)
    return values


def parse(*arguments):
    return command_line.parse(arguments, command_flags(), required=("config",))


def overridden(*arguments):
    return parse("--config=demo", *arguments).config


def get(frozen, name):
    section, field = name.split(".")
    return getattr(getattr(frozen, section), field)


def candidates(value):
    """Other values of the same type, as (typed on the command line, expected)."""
    if isinstance(value, bool):
        return [(str(not value).lower(), not value)]
    if isinstance(value, int | float):
        numbers = [
            value * 2,
            value + 2,
            value + 1,
            value + 1_000,
            value / 2 if isinstance(value, float) else value // 2,
        ]
        return [(str(number), number) for number in numbers if number != value]
    if isinstance(value, str):
        choices = (
            *config.ALGORITHMS,
            *config.ATTENTIONS,
            *config.DTYPES,
            *config.KV_DTYPES,
            *config.REMAT_POLICIES,
            *config.ROPE_TYPES,
            *config.SOURCES,
            *config.SYNTHETIC_TASKS,
            *config.FORMATS,
            *config.TEMPLATES,
            *config.TURNS,
            *config.OPTIMIZERS,
            *config.SCHEDULES,
            *config.MASKING_SCHEDULES,
            *config.OBJECTIVES,
            *config.CLEAN_ORDERS,
            *config.MORE_IS_BETTER,
        )
        return [(text, text) for text in (*choices, *config.TOKENIZER_TYPES, "dir/other.model") if text != value]
    lists = [
        ("7,5,6", (7, 5, 6)),
        ("3,9", (3, 9)),
        ("x.jsonl,../y.jsonl", ("x.jsonl", "../y.jsonl")),
        ("o_proj", ("o_proj",)),
    ]
    return [*lists, ("1,2.5,3,4", (1.0, 2.5, 3.0, 4.0)), ("9.5,2.5", (9.5, 2.5))]


@pytest.fixture
def every_field_preset(tmp_path, name):
    """A preset in which the field `name` can be overridden alone: data.source 'json' needs files, data.weights three,
    adapters a rank and weights to adapt, a length of the decay the schedule that has one, a ramp the RoPE that has one,
    passes no steps.
    """
    model = "rope_type='yarn'" if name in ("model.rope_ramp", "model.rope_attention_factor") else ""
    length = "steps=0, epochs=5, " if name == "train.epochs" else ""
    optimizer = "schedule='wsd', decay_steps=9" if name == "optimizer.decay_steps" else ""
    path = tmp_path / "preset.py"
    path.write_text(
        "from refusion_jax.command_line import config_dict\n"
        "from refusion_jax.config import Config, DataConfig, LoraConfig, ModelConfig, OptimizerConfig, TrainConfig\n"
        "def get_config():\n"
        f"    optimizer = OptimizerConfig({optimizer})\n"
        "    data = DataConfig(source='json', train_files=('a', 'b', 'c'))\n"
        f"    adapted = {{'lora': LoraConfig(rank=4), 'train': TrainConfig({length}init_from='x')}}\n"
        f"    model = ModelConfig({model})\n"
        "    return config_dict(Config(model=model, data=data, optimizer=optimizer, **adapted))\n"
    )
    return path


@pytest.mark.parametrize("name", LEAVES)
def test_every_field_can_be_overridden(name, every_field_preset):
    before = parse(f"--config={every_field_preset}").config
    for text, expected in candidates(get(before, name)):
        try:
            after = parse(f"--config={every_field_preset}", f"--config.{name}={text}").config
        except ConfigError:
            continue
        # Tuples of text take the numbers as text; the next candidate is theirs.
        if get(after, name) == expected:
            break
    else:
        pytest.fail(f"no other value of {name} was accepted")
    section, field = name.split(".")
    changed = dataclasses.replace(getattr(before, section), **{field: expected})
    assert after == dataclasses.replace(before, **{section: changed})


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_load_by_name_and_by_path(path):
    by_name = parse(f"--config={path.stem}").config
    assert isinstance(by_name, Config)
    assert by_name == parse(f"--config=configs/{path.name}").config
    assert by_name == parse(f"--config={path}").config


# Parameters of the presets that begin with published weights.
PUBLISHED = {
    "qwen3_0p6b_sft": 596_049_920,
    "qwen3_1p7b_sft": 1_720_574_976,
    "qwen3_4b_sft": 4_022_468_096,
    "qwen3_8b_sft": 8_190_735_360,
    "refusion_8b_sft": 8_188_564_480,  # without the rows of Qwen3's vocabulary that no token has
    "lora_8b": 8_188_564_480,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_of_published_sizes(name):
    """Counted by abstract initialisation, which takes no memory."""
    config = parse(f"--config={name}").config
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    params = nn.unbox(jax.eval_shape(Transformer(config.model).init, jax.random.key(0), tokens, tokens))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == PUBLISHED[name]
    assert "/" in config.train.init_from
    assert config.data.template == "prompt"


def test_the_authors_settings():
    """Those of the published model (arXiv 2512.13586)."""
    config = parse("--config=refusion_8b_sft").config
    assert (config.data.max_length, config.data.pack, config.train.epochs) == (4096, False, 4)
    assert config.slots == SlotsConfig(sizes=(4, 8, 16, 32), epsilon=1e-3)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.warmup_steps) == (2e-5, "cosine", 0)
    assert (optimizer.weight_decay, optimizer.final_ratio) == (0.0, 0.0)
    decode = config.decode
    assert (decode.algorithm, decode.gen_length, decode.slot_size, decode.serial_num_blocks) == ("paper", 512, 32, 4)
    assert (decode.slot_threshold, decode.token_threshold) == (0.9, 0.4)


def test_installed_presets_are_found_anywhere_and_hidden_by_local_ones(tmp_path, monkeypatch):
    (tmp_path / "work" / "configs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    assert command_line.find_config("demo") == ROOT / "configs" / "demo.py"

    package = tmp_path / "site-packages" / "refusion_jax"
    (package / "configs").mkdir(parents=True)
    (package / "configs" / "demo.py").touch()
    monkeypatch.setattr(config_files, "_PACKAGE", package)
    assert command_line.find_config("demo") == package / "configs" / "demo.py"

    Path("configs", "demo.py").touch()
    assert command_line.find_config("demo") == Path("configs/demo.py")


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["--config.slots.sizes=4,8"], (4, 8)),
        (["--config.slots.sizes=(4,8)"], (4, 8)),
        (["--config.slots.sizes=[4, 8]"], (4, 8)),
        (["--config.slots.sizes=8"], (8,)),
        (["--config.slots.sizes=(8)"], (8,)),
        (["--config.slots.sizes", "4,8,16,32,64"], (4, 8, 16, 32, 64)),
        (["--config.slots.sizes=4", "--config.slots.sizes=8"], (4, 8)),
    ],
)
def test_lists_of_numbers(arguments, sizes):
    assert overridden(*arguments).slots.sizes == sizes


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("a.jsonl,../b.jsonl", ("a.jsonl", "../b.jsonl")),
        ("/data/a b.jsonl", ("/data/a b.jsonl",)),
        ("2024,2025", ("2024", "2025")),
        ("('a,b.jsonl', 'c.jsonl')", ("a,b.jsonl", "c.jsonl")),
        ("", ()),
    ],
)
def test_lists_of_text(text, files):
    assert overridden(f"--config.data.train_files={text}").data.train_files == files


def test_a_whole_number_serves_as_a_float():
    learning_rate = overridden("--config.optimizer.learning_rate=1").optimizer.learning_rate
    assert learning_rate == 1.0
    assert type(learning_rate) is float


def test_a_preset_with_a_whole_number_still_takes_a_fraction():
    edited = command_line.config_dict(Config(optimizer=OptimizerConfig(learning_rate=1)))
    edited.optimizer.learning_rate = 0.5
    assert command_line.freeze(edited).optimizer.learning_rate == 0.5


@pytest.mark.parametrize(
    ("arguments", "pack"),
    [
        (["--config.data.pack=false"], False),
        (["--noconfig.data.pack"], False),
        (["--config.data.pack"], True),
        (["--config.data.pack=True"], True),
    ],
)
def test_switches(arguments, pack):
    assert overridden(*arguments).data.pack is pack


def test_order_and_spelling_of_flags_do_not_matter():
    args = parse("--config.train.steps", "200", "--rows", "4", "--config.mesh.data", "-1", "--config", "demo",
                 "--config.mesh.fsdp=1", "-workdir=runs/x", "--config.train.steps=300")  # fmt: skip
    assert (args.workdir, args.rows) == ("runs/x", 4)
    assert (args.config.train.steps, args.config.mesh.data) == (300, -1)


def test_parsing_leaves_the_definitions_alone():
    values = command_flags()
    first = command_line.parse(["--config=demo", "--rows=1", "--config.train.seed=5"], values)
    second = command_line.parse(["--config=demo"], values)
    assert (first.rows, first.config.train.seed) == (1, 5)
    assert (second.rows, second.config.train.seed) == (8, 0)


def test_config_dict_and_freeze_are_inverse():
    frozen = Config(data=DataConfig(source="json", train_files=("a", "b")), slots=SlotsConfig(sizes=(4,)))
    editable = command_line.config_dict(frozen)
    assert isinstance(editable, ConfigDict)
    assert editable.slots.sizes == (4,)
    assert command_line.freeze(editable) == frozen


REFUSED = [
    (["--config=dmeo"], "Unknown preset 'dmeo'. Did you mean 'demo'?"),
    (["--config=configs/dmeo.py"], "No config file 'configs/dmeo.py'. Did you mean 'configs/demo.py'?"),
    (["--config=nowhere/x.py"], "No config file 'nowhere/x.py'."),
    ([], "--config is missing"),
    (["--config=demo", "--config.train.stpes=5"], "Unknown config field 'train.stpes'. Did you mean 'train.steps'?"),
    (["--config=demo", "--config.trian.steps=5"], "Unknown config field 'trian.steps'. Did you mean 'train.steps'?"),
    (["--config=demo", "--config.steps=5"], "Unknown config field 'steps'. Did you mean 'train.steps'?"),
    (["--config=demo", "--config.zzz=5"], "Unknown config field 'zzz'. Known: checkpoint, data,"),
    (["--config=demo", "--config.train.steps=abc"], "train.steps is 'abc'; it must be of type int."),
    (["--config=demo", "--config.train.steps=1.5"], "train.steps is '1.5'; it must be of type int."),
    (["--config=demo", "--config.slots.epsilon=x"], "slots.epsilon is 'x'; it must be of type float."),
    (["--config=demo", "--config.data.pack=maybe"], "data.pack is 'maybe'; it must be of type bool."),
    (["--config=demo", "--config.slots.sizes=4,x"], "slots.sizes is '4,x'; give values of type int"),
    (["--config=demo", "--config.slots.sizes=(4.5,)"], "slots.sizes is '(4.5,)'; give values of type int"),
    (["--config=demo", "--config.slots.sizes=(4"], "slots.sizes is '(4'; give values of type int"),
    (
        ["--config=demo", "--config.train.steps=0"],
        "train.steps is 0 and train.epochs 0; one of them says how long a run is: give at least 1",
    ),
    (["--config=demo", "--config.train.steps"], "--config.train.steps needs a value."),
    (["--config=demo", "--noconfig.train.steps"], "write --config.train.steps=VALUE."),
    (["--config=demo", "--wrokdir=x"], "Unknown flag '--wrokdir'. Did you mean '--workdir'?"),
    (["--config=demo", "--rows=x"], "flag --rows=x"),
    (["--config=demo", "stray"], "Unexpected argument 'stray'"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_what_cannot_be_used_ends_with_one_line_and_status_2(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as caught:
        command_line.run(lambda args: pytest.fail("called main"), command_flags(), arguments=arguments)
    output = capsys.readouterr()
    assert caught.value.code == 2
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert sentence in output.err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no get_config()"),
        ("def get_config(): return {}", "returns a dict; return config_dict(Config(...))."),
        (
            "from ml_collections import ConfigDict\ndef get_config(): return ConfigDict({'train': {'stpes': 5}})",
            "Unknown config field 'train.stpes'.",
        ),
    ],
)
def test_config_files_that_return_no_config(text, sentence, tmp_path):
    (tmp_path / "preset.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(f"--config={tmp_path}/preset.py")
    assert sentence in str(caught.value)


def test_a_required_flag_is_named_after_unknown_ones():
    with pytest.raises(ConfigError, match=r"^--workdir is missing: Directory of the run\.$"):
        command_line.parse(["--config=demo"], command_flags(), required=("workdir",))
    with pytest.raises(ConfigError, match=r"^Unknown flag '--wrokdir'"):
        command_line.parse(["--config=demo", "--wrokdir=x"], command_flags(), required=("workdir",))


def test_a_command_without_config_refuses_overrides():
    values = flags.FlagValues()
    flags.DEFINE_string("prompt", None, "Text to answer.", flag_values=values)
    assert command_line.parse(["--prompt=hello"], values).prompt == "hello"
    with pytest.raises(ConfigError, match=r"Unknown flag '--config\.train\.steps'"):
        command_line.parse(["--config.train.steps=5"], values)


def test_run_hands_the_parsed_flags_to_main():
    seen = []
    command_line.run(seen.append, command_flags(), arguments=["--config=demo", "--workdir=runs/x"])
    assert seen[0].workdir == "runs/x"
    assert isinstance(seen[0].config, Config)


def test_errors_of_the_package_are_messages_and_others_keep_their_traceback(capsys):
    class DataError(ValueError):
        __module__ = "refusion_jax.data.records"

    class CheckpointError(OSError):
        __module__ = "refusion_jax.training.checkpoint"

    def raising(error):
        def main(args):
            raise error

        return lambda: command_line.run(main, command_flags(), arguments=["--config=demo"])

    for error in (DataError("line 3 of a.jsonl\nis no object"), CheckpointError("runs/x is empty")):
        with pytest.raises(SystemExit) as caught:
            raising(error)()
        assert caught.value.code == 2
    assert capsys.readouterr().err == "error: line 3 of a.jsonl is no object\nerror: runs/x is empty\n"
    for bug in (ValueError("operands could not be broadcast"), OSError("disk"), KeyError("x")):
        with pytest.raises(type(bug)):
            raising(bug)()


def test_help_lists_flags_presets_and_fields(capsys):
    def main(args):
        pytest.fail("called main")

    command_line.run(main, command_flags(), arguments=["--help"])
    output = capsys.readouterr().out
    assert output.startswith(__doc__)
    assert "--workdir: Directory of the run." in output
    assert "Presets: demo, gsm8k" in output
    for name in LEAVES:
        assert f"--config.{name}=" in output


def test_every_package_is_in_the_wheel():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("refusion_jax/**/__init__.py")}
    assert listed == found | {"refusion_jax.configs", "refusion_jax.configs.eval"}


def test_an_interrupt_is_no_traceback(capsys):
    def main(args):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as status:
        command_line.run(main, flags.FlagValues(), arguments=[])
    assert status.value.code == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_a_reader_that_is_gone_ends_the_process_quietly():
    code = (
        "from absl import flags; from refusion_jax import command_line\n"
        "command_line.run(lambda args: print('x' * 10**6), flags.FlagValues(), arguments=[])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141  # as SIGPIPE would end it
