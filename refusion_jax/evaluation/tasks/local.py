"""The harness's GSM8K and HumanEval, with their data from a local folder: no network is needed.

The folder is the metadata "data": `evaluate.py --data=DIR`, or

    lm_eval --include_path=PACKAGE/evaluation/tasks --metadata data=DIR --tasks gsm8k --model refusion_jax ...
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from refusion_jax.config import ConfigError
from refusion_jax.evaluation import humaneval
from refusion_jax.evaluation.data_files import find_file, read_objects

# By data set: of each split the files that may hold it, the first found counts.
FILES = {
    "gsm8k": {"train": ("train.jsonl", "train.jsonl.gz"), "test": ("test.jsonl", "test.jsonl.gz")},
    "humaneval": {"test": humaneval.FILE_NAMES},
}
FIELDS = {
    "gsm8k": ("question", "answer"),
    "humaneval": ("task_id", "prompt", "entry_point", "canonical_solution", "test"),
}


class LocalTask(ConfigurableTask):
    """A task of the harness that reads a local folder.

    Its file names itself (`task`), the harness's file that says all the rest (`harness_file`, below lm_eval/tasks) and
    the data set (`data_set`).

    Raises:
      ConfigError: when no folder was given, or it does not hold the data.
    """

    def __init__(self, config: Mapping[str, Any]):
        own = dict(config)
        metadata = own.get("metadata") or {}
        self._data_set, file = own.pop("data_set"), own.pop("harness_file")
        self._folder = metadata.get("data")
        own.pop("class")
        harness = load_yaml(Path(lm_eval.tasks.__file__).parent / file)
        for key in ("tag", "group", "task_list"):
            harness.pop(key, None)
        merged = {**harness, **own, "metadata": {**(harness.get("metadata") or {}), **metadata}}
        merged.pop("dataset_kwargs", None)
        super().__init__(config=merged)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Reads the folder."""
        if not self._folder:
            raise ConfigError(f"The task {self.config.task} reads a local folder; say which, with --data=DIR, or "
                              "--metadata data=DIR of lm_eval.")  # fmt: skip
        self.dataset = read_data_set(Path(self._folder), self._data_set)


def read_data_set(folder: Path, name: str) -> datasets.DatasetDict:
    """The splits of a data set: JSON-lines files in a folder, or in the folder of its name there.

    Raises:
      ConfigError: when a file is missing or does not hold such objects, naming it.
    """
    splits = {}
    for split, names in FILES[name].items():
        path = find_file(folder, name, names)
        records = [{field: line[field] for field in FIELDS[name]} for _, line in read_objects(path, FIELDS[name])]
        if not records:
            raise ConfigError(f"{path} holds nothing; give the {split} split of {name}.")
        splits[split] = datasets.Dataset.from_list(records)
    return datasets.DatasetDict(splits)
