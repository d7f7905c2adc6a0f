"""quick_imports: no garbage is collected while modules are imported."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.runtime.imports import quick_imports


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    before = gc.isenabled()
    gc.enable()
    yield
    if not before:
        gc.disable()


class Cycle:
    """Something that only the collector can remove."""

    def __init__(self) -> None:
        self.itself = self


def make_garbage() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module that can be imported and has not been."""
    (tmp_path / "never_imported_before.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "never_imported_before"
    sys.modules.pop("never_imported_before", None)


def test_the_collector_rests_inside_and_works_again_afterwards():
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_failed_import_lets_the_collector_work_again():
    with pytest.raises(ModuleNotFoundError), quick_imports():
        importlib.import_module("no_such_module_anywhere")
    assert gc.isenabled()


def test_a_collector_that_was_switched_off_stays_so():
    gc.disable()
    with quick_imports():
        pass
    assert not gc.isenabled()


def test_later_collections_do_not_look_at_what_was_imported(module: str):
    with quick_imports():
        importlib.import_module(module)
        garbage = make_garbage()
    gc.collect()
    assert garbage() is not None


def test_garbage_is_collected_where_nothing_was_imported():
    with quick_imports():
        garbage = make_garbage()
    gc.collect()
    assert garbage() is None
