"""Finding the tasks that an evaluation is asked for, before anything is spent on them."""

import difflib
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.group import Group
from lm_eval.tasks import TaskManager

from refusion_jax.config import ConfigError, DecodeConfig
from refusion_jax.evaluation.code_tasks import CodeNotAllowed, code_not_allowed
from refusion_jax.evaluation.settings import decode_config, find_eval_config

LOCAL_TASKS = Path(__file__).parent / "tasks"
_SUGGESTIONS = 3


def load_tasks(names: Sequence[str], data: str | None) -> list[Any]:
    """The tasks and groups of these names, their data loaded.

    Args:
      names: of tasks, groups and tags; * stands for any characters.
      data: local folder that the tasks in `LOCAL_TASKS` read instead of downloading.

    Raises:
      ConfigError: for an unknown name, with the nearest ones, or a task whose data cannot be had, saying which.
    """
    manager = _manager(names, data)
    found: list[Any] = []
    for name in names:
        matches = manager.match_tasks([name])
        if not matches:
            near = difflib.get_close_matches(name, manager.all_tasks, n=_SUGGESTIONS, cutoff=0.5)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else " See lm_eval ls tasks."
            raise ConfigError(f"Unknown task {name!r}.{hint}")
        for match in matches:
            found += _load(manager, match, data)
    return found


def _manager(names: Sequence[str], data: str | None) -> TaskManager:
    logger = logging.getLogger("lm_eval.tasks._index")
    level = logger.level
    logger.setLevel(logging.ERROR)  # that the local tasks take the place of others is the purpose
    try:
        # Reading the harness's thousands of task files takes a while, which local tasks need not.
        return TaskManager(
            include_path=None if data is None else str(LOCAL_TASKS),
            include_defaults=data is None or not set(names) <= _local_names(),
            metadata={} if data is None else {"data": data},
        )
    finally:
        logger.setLevel(level)


def _local_names() -> set[str]:
    return {path.stem for path in LOCAL_TASKS.glob("*.yaml")}


def _load(manager: TaskManager, name: str, data: str | None) -> list[Any]:
    """The group of this name, or the task, or the tasks of the tag."""
    try:
        loaded = manager.load([name])
    except CodeNotAllowed as error:
        raise code_not_allowed(name) from error
    except ConfigError:
        raise
    except Exception as error:  # of whatever library reads or downloads
        hint = f"; {', '.join(sorted(_local_names()))} can also read a folder, --data=DIR" if data is None else ""
        config = manager.task_index[name].cfg or {}
        source = " ".join(str(config[key]) for key in ("dataset_path", "dataset_name") if config.get(key))
        what = f"the data set {source}" if source else "its data sets"
        raise ConfigError(
            f"The task {name} cannot be loaded: it needs {what} ({type(error).__name__}: {_first_line(error)}); "
            f"without a network, download it elsewhere and copy it to HF_HOME (~/.cache/huggingface){hint}."
        ) from error
    groups, children = loaded.get("groups", {}), loaded.get("group_map", {})
    below = {child for names in children.values() for child in names}
    inside = {task.task_name for group in groups.values() for task in group.get_all_tasks()}
    tops = [group for group_name, group in groups.items() if group_name not in below]
    return [*tops, *(task for task_name, task in loaded["tasks"].items() if task_name not in inside)]


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200].rstrip(".")


def leaves(tasks: Sequence[Any]) -> list[Any]:
    """The tasks themselves, those of groups included."""
    return [leaf for top in tasks for leaf in (top.get_all_tasks() if isinstance(top, Group) else [top])]


def check_tasks(
    tasks: Sequence[Any],
    allow_code: bool,
    overrides: Sequence[Mapping[str, Any]],
    use_eval_configs: bool,
    num_fewshot: int | None = None,
) -> None:
    """Refuses, before a model is loaded, what would fail later.

    Args:
      tasks: what `load_tasks` returned.
      allow_code: whether generated code may be run.
      overrides: the decode settings that were set, of each evaluation.
      use_eval_configs: whether configs/eval says how its tasks are decoded.
      num_fewshot: examples that prompts are to have; None for as many as a task says.

    Raises:
      ConfigError: for a task that runs code which may not, settings that do not go together, or more examples than a
        task has.
    """
    for task in leaves(tasks):
        if getattr(task, "UNSAFE_CODE", False) and not allow_code:
            raise code_not_allowed(task.task_name)
        if task.OUTPUT_TYPE == "generate_until" and find_eval_config(task.task_name) is not None:
            for settings in overrides:
                decode_config(task.task_name, DecodeConfig(), settings, {}, use_eval_configs)
        _check_fewshot(task, num_fewshot)


def _check_fewshot(task: Any, num_fewshot: int | None) -> None:
    if not num_fewshot:
        return
    if task.get_config("num_fewshot") == 0:
        print(f"The task {task.task_name} is one without examples; --num_fewshot does not count.", file=sys.stderr)
        return
    found = task.fewshot_docs()
    if found is None:
        return
    # A document is no example for itself.
    shown_to_itself = task.fewshot_cfg.split in (task.config.test_split, task.config.validation_split)
    if num_fewshot > len(found) - (task.fewshot_cfg.split is not None and shown_to_itself):
        raise ConfigError(
            f"The task {task.task_name} has {len(found)} examples to show, too few for --num_fewshot={num_fewshot}; "
            "give fewer."
        )
