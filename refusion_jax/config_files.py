"""Settings that are Python files with a `get_config()`: finding those of configs/, and running one."""

import importlib.util
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parent


def find_config_files(folder: str = "") -> dict[str, Path]:
    """By name, the files of `configs/FOLDER`: of the package's, and of the working directory's, which win."""
    # A wheel carries them inside the package; a checkout, also one installed editable, has them beside it.
    installed = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
    places = (installed / folder, Path("configs", folder))
    return {path.stem: path for place in places for path in sorted(place.glob("*.py"))}


def run_config_file(path: Path) -> ModuleType:
    """The module that a file is."""
    spec = importlib.util.spec_from_file_location(f"refusion_jax_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
