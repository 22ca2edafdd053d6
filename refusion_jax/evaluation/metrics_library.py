"""Hugging Face's library `evaluate`, which the harness's tasks import by a name that a checkout's script has too."""

import importlib
import sys
from pathlib import Path
from types import ModuleType


def import_evaluate() -> ModuleType:
    """The library, also where `import evaluate` would find the script evaluate.py; from then on it finds the library.

    Raises:
      ImportError: when it is not installed.
    """
    found = sys.modules.get("evaluate")
    if found is not None and hasattr(found, "load"):
        return found
    sys.modules.pop("evaluate", None)
    path = sys.path
    sys.path = [folder for folder in path if not Path(folder, "evaluate.py").is_file()]
    try:
        return importlib.import_module("evaluate")
    finally:
        sys.path = path
