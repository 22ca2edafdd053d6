"""Tasks of the harness that run generated code: they do it in the sandbox, or not at all.

They score with the metric `code_eval`, which they load when their file is read and which comes from the Hugging Face
Hub and runs code with the evaluator's rights. While `code_execution` lasts they get one that runs it in the sandbox.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from refusion_jax.config import ConfigError
from refusion_jax.evaluation.code_metric import code_eval
from refusion_jax.evaluation.metrics_library import import_evaluate
from refusion_jax.evaluation.sandbox import Limits, check_sandbox

METRIC = "code_eval"


class CodeNotAllowed(ConfigError):
    """A task runs code without being allowed to."""


def code_not_allowed(task: str = "", flag: str = "--allow_code_execution") -> CodeNotAllowed:
    """What is raised for a task that runs code without being allowed to; `flag` allows it."""
    name = f"The task {task}" if task else "The task"
    return CodeNotAllowed(
        f"{name} runs generated code, which is done on request alone; give {flag} to run it in a sandbox."
    )


class _CodeEval:
    """The metric, as `evaluate.load` returns one."""

    def __init__(self, is_allowed: bool, limits: Limits, flag: str):
        if not is_allowed:
            raise code_not_allowed(flag=flag)
        check_sandbox()
        self._limits = limits

    def compute(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1, 10, 100)
    ) -> Any:
        """See `code_eval`."""
        return code_eval(references, predictions, tuple(k), self._limits)


@contextlib.contextmanager
def code_execution(is_allowed: bool, limits: Limits, flag: str = "--allow_code_execution") -> Iterator[None]:
    """Within it, tasks that are loaded run code in the sandbox.

    Args:
      is_allowed: whether they may run code; else loading one raises ConfigError.
      limits: of each program.
      flag: what messages call the leave.
    """
    library: Any = import_evaluate()
    original = library.load

    def load(path: str, *arguments: Any, **options: Any) -> Any:
        return _CodeEval(is_allowed, limits, flag) if path == METRIC else original(path, *arguments, **options)

    library.load = load
    try:
        yield
    finally:
        library.load = original
