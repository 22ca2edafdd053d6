"""Finding tasks, and their data in a local folder."""

import sys
from pathlib import Path

import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from refusion_jax.config import ConfigError
from refusion_jax.evaluation import task_loading
from refusion_jax.evaluation.code_tasks import code_execution
from refusion_jax.evaluation.sandbox import Limits
from refusion_jax.evaluation.task_loading import LOCAL_TASKS, check_tasks, load_tasks
from refusion_jax.evaluation.tasks.local import read_data_set

LOCAL = sorted(path.stem for path in LOCAL_TASKS.glob("*.yaml"))


@pytest.fixture(scope="module")
def whole_index():
    return TaskManager()


@pytest.fixture
def harness(whole_index, monkeypatch):
    """The harness's tasks, read once."""
    monkeypatch.setattr(task_loading, "_manager", lambda *_: whole_index)


@pytest.mark.parametrize("name", [name for name in LOCAL if name.startswith("gsm8k")])
def test_local_tasks_are_the_harnesss_but_for_their_data(name, data):
    (task,) = load_tasks([name], str(data))
    own = load_yaml(LOCAL_TASKS / f"{name}.yaml", resolve_func=False)
    theirs = load_yaml(Path(lm_eval.tasks.__file__).parent / own["harness_file"])
    assert (theirs["task"], task.task_name) == (name, name)
    for field in ("doc_to_text", "doc_to_target", "generation_kwargs", "filter_list", "num_fewshot", "output_type"):
        assert getattr(task.config, field, None) == theirs.get(field), field
    assert [doc["question"] for doc in task.test_docs()] == ["What is 1+1?", "What is 2+2?", "What is 3+3?"]


def test_several_tasks(data):
    found = load_tasks(["gsm8k_cot", "gsm8k"], str(data))
    assert [task.task_name for task in found] == ["gsm8k_cot", "gsm8k"]


def test_code_tasks_need_leave(data, monkeypatch):
    # It may have been loaded with leave, for another test.
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.humaneval.utils", raising=False)
    with (
        code_execution(False, Limits()),
        pytest.raises(ConfigError, match=r"The task humaneval runs generated code, .* --allow_"),
    ):
        load_tasks(["humaneval"], str(data))


def test_code_tasks_are_refused_also_when_they_were_loaded_before(data):
    class Task:
        UNSAFE_CODE, OUTPUT_TYPE, task_name = True, "generate_until", "mbpp"

    with pytest.raises(ConfigError, match="The task mbpp runs generated code, which is done on request alone"):
        check_tasks([Task()], False, [{}], True)
    check_tasks([Task()], True, [{}], True)


def test_settings_are_checked_before_a_model_is_loaded(data):
    tasks = load_tasks(["gsm8k"], str(data))
    with pytest.raises(ConfigError, match=r"Task gsm8k: decode.gen_length 96"):
        check_tasks(tasks, False, [{}, {"gen_length": 96}], True)
    check_tasks(tasks, False, [{}, {"gen_length": 96}], False)


def test_more_examples_than_there_are_are_refused(data):
    tasks = load_tasks(["gsm8k", "gsm8k_cot"], str(data))
    check_tasks(tasks, False, [{}], True, 3)
    with pytest.raises(ConfigError, match=r"The task gsm8k has 3 examples to show, too few for --num_fewshot=4; give"):
        check_tasks(tasks, False, [{}], True, 4)
    check_tasks(tasks[1:], False, [{}], True, 8)
    with pytest.raises(ConfigError, match=r"The task gsm8k_cot has 8 examples to show, too few for --num_fewshot=9"):
        check_tasks(tasks[1:], False, [{}], True, 9)


@pytest.mark.slow  # the harness has thousands of task files
@pytest.mark.parametrize(
    "name, hint",
    [("gsm8k_cto", "Did you mean 'gsm8k_cot' or 'gsm8k'"), ("zzzzzzzzzz", "See lm_eval ls tasks.")],
)
def test_unknown_tasks_are_refused_with_the_nearest(harness, name, hint):
    with pytest.raises(ConfigError, match=f"Unknown task {name!r}. .*{hint}"):
        load_tasks([name], None)


@pytest.mark.slow
def test_data_that_cannot_be_had_are_named(harness, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda **_: (_ for _ in ()).throw(ConnectionError("no network\nat")))
    text = (
        r"The task arc_easy cannot be loaded: it needs the data set allenai/ai2_arc ARC-Easy "
        r"\(ConnectionError: no network\); without a network, download it elsewhere and copy it to HF_HOME .*gsm8k, "
    )
    with pytest.raises(ConfigError, match=text):
        load_tasks(["arc_easy"], None)


# ---- the files -----------------------------------------------------------------------------------------------------


def test_files_may_lie_in_the_folder_itself_or_in_that_of_their_name(data):
    assert len(read_data_set(data, "gsm8k")["test"]) == len(read_data_set(data / "gsm8k", "gsm8k")["test"]) == 3
    assert read_data_set(data, "humaneval")["test"][1]["entry_point"] == "twice"


def test_data_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"--data .*none is not a directory; name the one that has the files of gsm8k"
    ):
        read_data_set(tmp_path / "none", "gsm8k")
    with pytest.raises(ConfigError, match=r"No train.jsonl or train.jsonl.gz in .*; put the file of gsm8k there"):
        read_data_set(tmp_path, "gsm8k")
    (tmp_path / "train.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"train.jsonl holds nothing; give the train split of gsm8k"):
        read_data_set(tmp_path, "gsm8k")
