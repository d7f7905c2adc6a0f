"""Loading the tokenizer of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.text.chat_template import ChatTemplateError, load_tokenizer


def test_folder_without_a_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(ChatTemplateError, match=r"model\.path .* has no tokenizer"):
        load_tokenizer(str(tmp_path))
