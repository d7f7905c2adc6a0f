"""The functions of docs/serving.md that call the tool of the starter task."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.doc_blocks import blocks_of

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_tool_is_a_function_for_the_client(monkeypatch: pytest.MonkeyPatch):
    page = REPOSITORY / "docs" / "serving.md"
    (block,) = [
        one for one in blocks_of(page, "python") if one.text.startswith('"""my_tools.py"""')
    ]
    monkeypatch.syspath_prepend(REPOSITORY / "examples" / "starter")
    names: dict[str, Any] = {}
    try:
        exec(compile(block.text, str(block), "exec"), names)
    finally:
        sys.modules.pop("task", None)
    assert "Jade Journey was published in 1910" in names["search"](query="Jade Journey")
