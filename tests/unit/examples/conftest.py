"""Loads the modules of examples/tiny_world, a plain folder of scripts, for its tests."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "tiny_world"
MODULES = ("world", "questions", "tokenizer", "generate", "init_model")


@pytest.fixture(scope="session")
def tiny_world() -> SimpleNamespace:
    """The example's modules by name; their short names are gone from sys.modules afterwards."""
    sys.path.insert(0, str(FOLDER))
    modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in MODULES}
    sys.path.remove(str(FOLDER))
    for name in MODULES:
        del sys.modules[name]
    return SimpleNamespace(**modules)


@pytest.fixture(scope="session")
def world_files(tiny_world: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the generated files of world 5, demonstrations left out."""
    folder = tmp_path_factory.mktemp("world")
    tiny_world.generate.write_world(5, folder, demonstrations=False)
    return folder
