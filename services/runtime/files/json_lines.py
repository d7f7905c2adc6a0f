"""The lines of a JSON-lines file, for every reader of one."""

from __future__ import annotations


def split_lines(text: str) -> list[str]:
    """Return the lines of a JSON-lines file; the last one may lack its newline.

    Not `str.splitlines`, which also breaks at U+2028, U+0085 and others that a JSON string holds as
    they are.
    """
    return text.removesuffix("\n").split("\n") if text else []
