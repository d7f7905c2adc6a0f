"""Loads the modules of the small examples, plain folders of scripts, for their tests."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TINY_SCRIPTS = ("world", "questions", "tokenizer", "generate")
DEEP_SCRIPTS = (
    *TINY_SCRIPTS,
    "scripted",
    "catalogue",
    "demonstrations",
    "rejection_sampling",
    "right_runs",
    "unlabelled",
)
MATH_SCRIPTS = ("problems", "solvers", "demonstrations", "tokenizer", "generate")
CODE_SCRIPTS = (
    *("operations", "trials", "exercises", "programmers"),
    *("demonstrations", "tokenizer", "generate", "repair", "init_model", "pi_base"),
)

LOOKAHEAD_SCRIPTS = (
    *("residents", "policies", "sources", "valued"),
    *("demonstrations", "tokenizer", "generate"),
)


def load_scripts(example: str, names: Sequence[str]) -> SimpleNamespace:
    """Import the modules of an example; their short names are gone from sys.modules afterwards."""
    folder = str(EXAMPLES / example)
    sys.path.insert(0, folder)
    modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in names}
    sys.path.remove(folder)
    for name in names:
        del sys.modules[name]
    return SimpleNamespace(**modules)


@pytest.fixture(scope="session")
def tiny_world() -> SimpleNamespace:
    """The modules of tiny_world by name."""
    return load_scripts("tiny_world", TINY_SCRIPTS)


@pytest.fixture(scope="session")
def deep_world() -> SimpleNamespace:
    """The modules of deep_world by name."""
    return load_scripts("deep_world", DEEP_SCRIPTS)


@pytest.fixture(scope="session")
def deep_world_size() -> dict[str, int]:
    """How much of a world the tests generate."""
    sizes = {"num_names": 300, "num_train": 200, "num_eval": 150}
    return {**sizes, "num_demos": 150, "num_drills": 20}


@pytest.fixture(scope="session")
def deep_world_files(
    deep_world: SimpleNamespace,
    deep_world_size: dict[str, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with the generated files of a small world 5."""
    folder = tmp_path_factory.mktemp("deep_world")
    deep_world.generate.write_world(5, folder, **deep_world_size)
    return folder


@pytest.fixture(scope="session")
def tiny_math() -> SimpleNamespace:
    """The modules of tiny_math by name."""
    return load_scripts("tiny_math", MATH_SCRIPTS)


@pytest.fixture(scope="session")
def tiny_math_files(tiny_math: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small version of the files of seed 5."""
    folder = tmp_path_factory.mktemp("tiny_math")
    tiny_math.generate.write_problems(5, folder, num_train=200, num_eval=60, num_demos=400)
    return folder


@pytest.fixture(scope="session")
def tiny_code() -> SimpleNamespace:
    """The modules of tiny_code by name."""
    return load_scripts("tiny_code", CODE_SCRIPTS)


@pytest.fixture(scope="session")
def tiny_code_size() -> dict[str, int]:
    """How many exercises of each kind the tests generate."""
    return {"num_train": 100, "num_eval": 16, "num_repair": 20, "num_demos": 200}


@pytest.fixture(scope="session")
def tiny_code_files(
    tiny_code: SimpleNamespace,
    tiny_code_size: dict[str, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with a small version of the files of seed 5."""
    folder = tmp_path_factory.mktemp("tiny_code")
    tiny_code.generate.write_exercises(5, folder, **tiny_code_size)
    return folder


@pytest.fixture(scope="session")
def lookahead() -> SimpleNamespace:
    """The modules of lookahead by name."""
    return load_scripts("lookahead", LOOKAHEAD_SCRIPTS)


@pytest.fixture(scope="session")
def lookahead_size() -> dict[str, int]:
    """How much of a world the tests generate."""
    return {"num_people": 300, "num_train": 100, "num_eval": 120, "num_demos": 1200}


@pytest.fixture(scope="session")
def lookahead_files(
    lookahead: SimpleNamespace,
    lookahead_size: dict[str, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with the generated files of a small world 5."""
    folder = tmp_path_factory.mktemp("lookahead")
    lookahead.generate.write_world(5, folder, **lookahead_size)
    return folder
