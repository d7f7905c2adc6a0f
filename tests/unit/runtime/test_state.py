"""Lines of JSON-lines files."""

from __future__ import annotations

import json

import pytest

from agent_r1.runtime.files.state import split_lines
from tests.support.builders import SEPARATORS


@pytest.mark.parametrize("separator", SEPARATORS)
def test_a_line_ends_at_a_line_feed_alone(separator: str):
    lines = [json.dumps({"text": f"a{separator}b"}, ensure_ascii=False)] * 2
    assert split_lines("\n".join(lines) + "\n") == lines
    assert split_lines("\n".join(lines)) == lines


def test_a_file_without_a_line_has_none():
    assert split_lines("") == []
    assert split_lines("1\n\n2\n") == ["1", "", "2"]
