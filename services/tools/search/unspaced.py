"""Texts without blanks between words, cut into pieces that an index of words can hold.

Chinese, Japanese, Thai, Lao, Khmer and Burmese have no blanks between words, and Korean writes
particles onto them. Pieces of two characters, as Lucene's CJKAnalyzer makes them, need no
dictionary: a query finds every text that has a piece of it, and the text with most of them first.
"""

from __future__ import annotations

import re

_KANA = "\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"
_HAN = "\u2e80-\u2fdf\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
_HANGUL = "\u1100-\u11ff\u3131-\u318e\uac00-\ud7a3"
_BOPOMOFO = "\u3105-\u312f"
_SYLLABIC = f"{_HAN}{_KANA}{_HANGUL}{_BOPOMOFO}"
_ALPHABETIC = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\uaa60-\uaa7f"
"""Thai and Lao, Burmese, Khmer."""
_RUN = re.compile(f"(?P<syllabic>[{_SYLLABIC}]+)|[{_ALPHABETIC}]+")
_SIZES = {True: (1, 2), False: (2, 3)}
"""Of the pieces of syllabic scripts, and of others: one letter of an alphabet tells nothing."""
_MARKS = re.compile("[\u0e47-\u0e4e\u0ec8-\u0ece\u1037\u103a\u17c9-\u17d3\u17dd]")
"""Signs that stand over letters, at which the tokenizer would cut a word."""


def cut_unspaced(text: str) -> str:
    """Return a text in which runs of such scripts are replaced by their pieces."""
    return text if text.isascii() else _RUN.sub(_pieces, text)


def _pieces(run: re.Match[str]) -> str:
    is_syllabic = run["syllabic"] is not None
    word = run[0] if is_syllabic else _MARKS.sub("", run[0])
    sizes = [size for size in _SIZES[is_syllabic] if size <= len(word)]
    starts = [(size, start) for size in sizes for start in range(len(word) - size + 1)]
    pieces = [word[start : start + size] for size, start in starts] or [word]
    return f" {' '.join(pieces)} "
