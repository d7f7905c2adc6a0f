r"""Forms in which people and models write numbers, for `math_equal`.

math_equal.py finds the number that a text ends with; math_worker.py writes both answers that it
compares as the LaTeX that math-verify reads: 11 5/6 as 11\frac{5}{6}, 1e6 as 1\times 10^{6}.
"""

from __future__ import annotations

import re
import unicodedata

_DASHES = "\u2013\u2014\u2015"
"""En dash, em dash and bar: a minus, but between two digits a range (2020\u20132024)."""
_CHARACTERS = {
    **{wide: chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5F)},  # full width: 7 3 . - + %
    **dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u02d7\u2796\ufe58\ufe63"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2007\u2009\u202f\u3000"), " "),
    **dict.fromkeys(map(ord, "\u2044\u2215"), "/"),
    0xFE62: "+",
    0x066A: "%",
    0x066B: ".",
    0x066C: ",",
}
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")
_FRACTION = re.compile(r"[\u00bc-\u00be\u2150-\u215e]")
_MINUS = re.compile(rf"(?<!\d)[{_DASHES}]|[{_DASHES}](?!\d)")
_EMPHASIS = re.compile(
    r"""(?<![^\s(\[{$:=,"'>-])(\*{1,3}|_{1,3}|`{1,3})(?=\S)([^\n]{0,200}?\S)\1(?![\w(\\{*_`])"""
)

_CURRENCY = r"\\?[$€£¥₹￥￡]"
_FOREIGN_CURRENCY = re.compile(r"[€£¥₹￥￡](?=\s*[-+]?[\d.])|(?<=\d)\s*[€£¥₹￥￡]")
_UNDERSCORES = re.compile(r"(?<!\w)\d{1,3}(?:_\d{3})+(?!\w)")
_TIE = re.compile(r"(?<=\d)~+(?=[\d\\])")
_MIXED = re.compile(r"(?<![\w.,/^])(\d+)(?:\s|\\[ ,;:])+(\d+)\s*/\s*(\d+)(?!\w|[.,]\d|\s*[/^!])")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,3})(?!\w|\.\d)")
_TIMES = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")


def plain_characters(text: str) -> str:
    """Return a text with the ASCII forms of digits, signs and blanks, and ½ as 1/2."""
    text = _OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text)
    text = _FRACTION.sub(lambda sign: " " + unicodedata.normalize("NFKC", sign[0]), text)
    return _MINUS.sub("-", text.translate(_CHARACTERS))


def without_emphasis(text: str) -> str:
    """Return a text without Markdown's marks for bold and italic text and for code."""
    return _EMPHASIS.sub(r"\2", _EMPHASIS.sub(r"\2", text))  # one may stand in another


def as_latex(answer: str) -> str:
    """Return an answer in the forms of numbers that math-verify reads."""
    text = _FOREIGN_CURRENCY.sub("", plain_characters(answer))
    text = _UNDERSCORES.sub(lambda number: number[0].replace("_", ""), _TIE.sub(" ", text))
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _SCIENTIFIC.sub(lambda n: rf"{n[1]}\times 10^{{{int(n[2])}}}", text)
    return _TIMES.sub(r"\\times ", text)


# --- The number that a text ends with -------------------------------------------------------------

_POWER = r"\^\s?\{?\s?-?\d+\s?\}?"
_GROUPS = r"\d{1,3}(?:(?:[\ ,'_]|\{,\}|\\,)\d{3})+(?!\d)"
_PLAIN = rf"""(?:(?:{_GROUPS}|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?
    (?:\s?(?:[xX\u00d7*]|\\times|\\cdot)\s?10{_POWER}|{_POWER})?(?:/\d+)?"""
_UNIT = r"(?:[kcm]?m|[km]?g|m?[lL]|[kKMG]?[bB]|mph|hrs?|min|lbs?|oz|ft)[\u00b2\u00b3]?"
_NUMBER = rf"""(?:{_CURRENCY}\s?)?(?:
    (?:\d+\s?)?\\[dt]?frac\{{\d+\}}\{{\d+\}} | \d+[ ]+\d+/\d+ | {_PLAIN}
)(?:\s?\\?%)?(?=(?:{_UNIT})?(?![\w\u207a\u207b]))"""
_DASH = rf"[-{_DASHES}]"
_SIGNED = rf"(?:{_DASH}+[ \t]*|\+[ \t]*)?{_NUMBER}"
_LEADING = re.compile(rf"\s*({_SIGNED})", re.VERBOSE)
# Numbers that stand alone are what is left when operands (`more` is what an operator joins to the
# first), numbers in a formula and numbers in a word are taken out of a text.
_TOKENS = re.compile(
    rf"""
    (?P<operand> (?: (?<=\w) | [)\]}}%][ \t]* ) {_DASH}+ [ \t]* {_NUMBER}
        | (?: [±∓] | \\pm\b | \\mp\b ) [ \t]* {_NUMBER} )
    | (?P<number> (?<![\w.^√)\]}}{_DASHES}\u207b\u208b-]) {_SIGNED}
        (?P<more> (?: (?: [ \t]*(?:{_DASH}|[+*\u00d7÷/])[ \t]* | [.,:] ) {_SIGNED} )* ) )
    | (?P<formula> \\(?:[dt]?frac|sqrt)\s?(?:\[\w*\])?(?:\{{[^{{}}]{{0,99}}\}}){{1,2}}
        | [_^]\{{[^{{}}]{{0,99}}\}} )
    | (?P<word> [^\W\d]\w*(?:{_DASH}\w+)* )
    """,
    re.VERBOSE,
)
_BULLET = re.compile(
    rf"^[ \t]*(?:{_DASH}|[+*•])[ \t]+(?=(?:{_CURRENCY})?\d[^\n]*[^\W\d_]{{2}})", re.MULTILINE
)
_MINUS_WORD = re.compile(rf"\b(?:minus|negative)[ \t]+(?=(?:{_CURRENCY})?\.?\d)", re.IGNORECASE)
_AROUND = ' \t\n=\u2248:;,.\u2026"\u201c\u201d'
_WORD = re.compile(r"[^\W\d_]{2,}")
_COMMAND = re.compile(r"\\[a-zA-Z]")
_FUNCTIONS = frozenset({"sqrt", "log", "ln", "exp", "sin", "cos", "tan", "pi", "mod"})
_CHOICE = re.compile(r"\d\W*\s(?:or|to)\s\W*\d")


def last_number(text: str) -> str | None:
    """Return the last number that stands alone in a text, with its sign; None without one.

    A dash before a number is its sign, with or without a blank between them. It is none
    - in a word (COVID-19), between two numbers (3-5, 2020\u20132024, 10 - 7) or behind a bracket:
      what such a dash joins is no number, and neither is what another operator joins;
    - at the beginning of a line, with a blank, where words follow the number: that is a bullet.
    """
    text = without_emphasis(plain_characters(text))
    text = _MINUS_WORD.sub("-", _BULLET.sub("", text))
    tokens = _TOKENS.finditer(text)
    alone = [token["number"] for token in tokens if token["number"] and not token["more"]]
    return _signed(alone[-1]) if alone else None


def leading_number(text: str) -> str | None:
    """Return the number that a text begins with, with its sign; None without one."""
    found = _LEADING.match(plain_characters(text))
    return _signed(found[1]) if found else None


def is_number(text: str) -> bool:
    """Return whether a text is one number and nothing else."""
    return _LEADING.fullmatch(plain_characters(text).rstrip()) is not None


def number_of(answer: str) -> str:
    """Return the last number of an answer in words.

    An expression stays as it is, and so does an answer that leaves a choice: 3 or 5, 3 to 5.
    """
    answer = answer.strip(_AROUND)
    words = {word.lower() for word in _WORD.findall(answer)}
    if not words or words & _FUNCTIONS or _COMMAND.search(answer) or _CHOICE.search(answer):
        return answer
    return last_number(answer) or answer


def _signed(number: str) -> str:
    digits = number.lstrip(f"+-{_DASHES} \t")
    return digits if number[0] in ("+", digits[0]) else f"-{digits}"
