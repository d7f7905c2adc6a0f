r"""Forms in which people and models write numbers, for `math_equal`.

math_equal.py finds the number that a text ends with; math_worker.py writes both answers that it
compares as the LaTeX that math-verify reads: 11 5/6 as 11\frac{5}{6}, 1e6 as 1\times 10^{6}.
"""

from __future__ import annotations

import html
import re
import unicodedata

_DASHES = "\u2013\u2014\u2015"
"""En dash, em dash and bar: a minus, but between two digits a range (2020\u20132024)."""
_CHARACTERS = {
    **{wide: chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5F)},  # full width: 7 3 . - + %
    **dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u02d7\u2796\ufe58\ufe63"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u1680\u202f\u205f\u3000"), " "),
    **dict.fromkeys(range(0x2000, 0x200B), " "),
    **dict.fromkeys(map(ord, "\u2044\u2215"), "/"),
    0xFE62: "+",
    0x066A: "%",
    0x066B: ".",
    0x066C: ",",
    0x2103: "\u00b0C",
    0x2109: "\u00b0F",
}
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060-\u2064\ufe0e\ufe0f\ufeff]")
_ENTITY = re.compile(r"&(?:#\d{1,6}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z]{2,32});")
_NEGATIVE_SPACE = re.compile(r"\\!(?:(?<=,\\!) +)?")  # 10,\!080 and 10,\! 080
_SPACING = re.compile(r"(?<!\\)\\(?:[ ,;:>]|(?:q?quad|thinspace|enspace)(?![a-zA-Z]))|~")
_LOOKS = re.compile(
    r"\\(?:(?:text)?color(?:box)?(?:\[\w*\])?\{[^{}]*\}|(?:(?:display|text|(?:script)+)style|bf|rm|it"
    r"|sf|tt|bfseries|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge|boldsymbol|bm|pmb|u(?:nder)?line"
    r"|emph|ensuremath|[bB]igg?[lmr]?|(?:math|text)(?:bf|it|sf|tt|sl|up|normal)|hbox)(?![a-zA-Z])\s*"
    r"(?:\{((?:[^{}]|\{[^{}]*\}){0,200})\})?)"
)
"""Commands of LaTeX that change the looks of what follows, and nothing else."""
_BRACED_SIGN = re.compile(r"(?:\\[a-zA-Z]+\s?)?\{\s?-\s?\}|\\(?:text)?minus(?![a-zA-Z])")
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")
_FRACTION = re.compile(r"[\u00bc-\u00be\u2150-\u215e]")
_BASE = r"(?<=[\d)\]}]|(?<![^\W\d_])[a-zA-Z])"
"""Behind what a power stands: a number, a bracket or a variable; in cm² it belongs to the unit."""
_SUPERSCRIPT = re.compile(_BASE + r"[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_STARS = re.compile(_BASE + r"[ ]?\*\*[ ]?(-?(?:\d+(?:\.\d+)?|[a-zA-Z]\b|\([^()]{1,99}\)))")
_MINUS = re.compile(rf"(?<!\d)[{_DASHES}]|[{_DASHES}](?!\d)")
_TAG = re.compile(r"</?(?:[bisu]|em|strong|code|mark|span|font|big|small)(?:\s[^<>]{0,99})?>", re.I)
_MINUSES = r"\u2212\u2010-\u2015\u02d7\u2796\ufe58\ufe63\uff0d-"
_MARK = r"(\*{1,3}|_{1,3}|`{1,3}|~~)"
_EMPHASIZED_SIGN = re.compile(rf"{_MARK}([+{_MINUSES}])\1(?=\s*\S)")
_EMPHASIS = re.compile(
    rf"""(?<![^\s(\[{{$:=,"'>{_MINUSES}]){_MARK}(?=\S)([^\n]{{0,200}}?\S)\1(?![\w(\\{{*_`])"""
)

_CURRENCY = r"\\?[$€£¥₹￥￡]"
_FOREIGN_CURRENCY = re.compile(r"[€£¥₹￥￡](?=\s*[-+]?[\d.])|(?<=\d)\s*[€£¥₹￥￡]")
_DEGREES = re.compile(
    r"(?:\{\})?(?:\\(?:text|mathrm)\{\s?[\u00b0\u00ba]\s?[CF]?\}|(?:[\u00b0\u00ba]|\^\s?\{\s?\\circ\s?\}"
    r"|\^\s?\\circ|\^?\\degree)\s*(?:(?:\\(?:text|mathrm)\s?)?\{\s?[CF]\s?\}|[CF]\b)?)"
)
_LETTER = re.compile(r"\A\s*\(?([a-zA-Z])[).:]+\s*\Z")  # a choice: A), (A) or A.
_BASE_OF = re.compile(r"\d_(?:\{\s*(\d{1,2})\s*\}|(\d))\s*\Z")
_CHOSEN = re.compile(r"\A(?:\\(?:text|mathrm|mbox)\s*\{)?\(([A-Z])\)\}?\s*(?:[\w$\\}]|\Z)")
_UNDERSCORES = re.compile(r"(?<!\w)\d{1,3}(?:_\d{3})+(?!\w)")
_MIXED = re.compile(r"(?<![\w.,/^])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\w|[.,]\d|\s*[/^!])")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,3})(?!\w|\.\d)")
_TIMES = re.compile(r"(?<=\d)\s*[xX\u00d7\u00b7\u22c5]\s*(?=10\s*\^)")
_ROOT = re.compile(r"([√∛∜])[ \t]*(?:[({]([^(){}]{1,99})[)}]|(\d+(?:\.\d+)?|\w))")
_ROOTS = {"√": "", "∛": "[3]", "∜": "[4]"}


def plain_characters(text: str) -> str:
    """Return a text with ASCII digits, signs and blanks, ½ as 1/2, and 10⁶ as 10^{6}."""
    text = _INVISIBLE.sub("", _ENTITY.sub(lambda entity: html.unescape(entity[0]), text))
    text = _OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text)
    text = _FRACTION.sub(lambda sign: " " + unicodedata.normalize("NFKC", sign[0]), text)
    text = _LOOKS.sub(r"\1", _LOOKS.sub(r"\1", text))  # one may stand in another
    text = _STARS.sub(r"^{\1}", _SUPERSCRIPT.sub(_power, text))
    text = _SPACING.sub(" ", _MINUS.sub("-", _NEGATIVE_SPACE.sub("", text.translate(_CHARACTERS))))
    return _BRACED_SIGN.sub("-", text)


def _power(sign: re.Match[str]) -> str:
    return f"^{{{unicodedata.normalize('NFKC', sign[0])}}}"


def without_emphasis(text: str) -> str:
    """Return a text without the marks of Markdown and HTML for bold text, code and such."""
    text = _EMPHASIZED_SIGN.sub(r"\2", _TAG.sub("", text))
    return _EMPHASIS.sub(r"\2", _EMPHASIS.sub(r"\2", text))  # one may stand in another


def as_latex(answer: str) -> str:
    """Return an answer in the forms of numbers that math-verify reads."""
    text = _FOREIGN_CURRENCY.sub("", _without_brackets(plain_characters(answer).strip(" =,;:")))
    text = _LETTER.sub(r"\1", _DEGREES.sub(r"^\\circ ", text))
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", _UNDERSCORES.sub(lambda n: n[0].replace("_", ""), text))
    text = _SCIENTIFIC.sub(lambda n: rf"{n[1]}\times 10^{{{int(n[2])}}}", text)
    text = _ROOT.sub(lambda root: rf"\sqrt{_ROOTS[root[1]]}{{{root[2] or root[3]}}}", text)
    return _TIMES.sub(r"\\times ", text)


def base_of(answer: str) -> int | None:
    """Return the base in which a number is written, 204_5; None where none is named."""
    found = _BASE_OF.search(answer)
    return int(found[1] or found[2]) if found else None


def choice_of(answer: str) -> str | None:
    """Return the letter of a choice, E of (E) and of (E) 5; None where an answer is none."""
    found = _CHOSEN.match(plain_characters(answer).strip())
    return found and found[1]


# --- The number that a text ends with -------------------------------------------------------------

_FUNCTIONS = frozenset({"sqrt", "log", "ln", "exp", "sin", "cos", "tan", "pi", "mod"})
_NAMES = "|".join(sorted(_FUNCTIONS))
_POWER = r"\^\s?(?:\{\s?-?\d+\s?\}|-?\d+)"
_GROUPS = r"\d{1,3}(?:(?:[\ ,'_]|\{,\}|\\,)\d{3})+(?!\d)"
_PLAIN = rf"""(?:(?:{_GROUPS}|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?
    (?:\s?(?:[xX\u00d7\u00b7\u22c5*]|\\times|\\cdot)\s?10{_POWER}|{_POWER})?(?:/\d+)?"""
_UNIT = r"(?:[kcm]?m|[km]?g|m?[lL]|[kKMG]?[bB]|mph|hrs?|min|lbs?|oz|ft)[\u00b2\u00b3]?"
_JOINED = rf"""(?:\.\d | \s?[)\]]?\s?\^(?!\s?\{{?\s?\\circ)
    | [ \t]*(?:[-+*/\u00d7\u00b7\u22c5\u00f7]|\\times|\\cdot)?[ \t]*
        (?: [√∛∜π] | \\(?:[dt]?frac|{_NAMES})(?![a-zA-Z]) | pi\b | (?:{_NAMES})[ ]?\( ) )"""
"""What makes a number part of an expression: 3√2, 3^x, 3\\sqrt{2}, 3 + √2."""
_DIGITS = r"(?:[ ]?\d|\{\s?\d+\s?\})"
_NUMBER = rf"""(?:{_CURRENCY}\s?)?(?:
    (?:\d+\s?)?\\[dt]?frac{_DIGITS}{_DIGITS} | \d+[ ]+\d+/\d+ | {_PLAIN}
)(?!{_JOINED})(?:\s?\\?%)?(?=(?:{_UNIT})?(?![\w\u207a\u207b]))"""
_DASH = rf"[-{_DASHES}]"
_SIGNED = rf"(?:{_DASH}+[ \t]*|\+[ \t]*)?{_NUMBER}"
_COMMAND_OF = (  # a command of an expression and what it takes: \\frac{\\pi}{2}, \\sqrt[3]2
    r"\\(?!(?:end|[fb]?boxe?d?|right|q?quad)(?![a-zA-Z]))[a-zA-Z]++(?:\[\w{0,9}\])?"
    r"(?:\s?\{(?:[^{}]|\{[^{}]*\}){0,99}\}|\s?[\da-zA-Z](?!\w))*+"
)
_ATOM = rf"""(?: (?:{_CURRENCY}\s?)?(?:\d+[ ]+(?=\d+/\d))?{_PLAIN}(?:\s?\\?%)?
    | \\[dt]?frac{_DIGITS}{_DIGITS} | {_COMMAND_OF} | (?!a\b)[a-zA-Z](?![\w'])
    | [(\[][^()\[\]\n]{{1,99}}[)\]] | \\\{{[^{{}}\n]{{1,99}}\\\}}
    )(?:[_^](?:\{{[^{{}}]{{1,99}}\}}|\w))?"""
_OPERATOR = rf"[ \t]*(?:{_DASH}|[+*\u00d7\u00b7\u22c5÷/]|\\times|\\cdot|\\div)[ \t]*"
_LEADING = re.compile(rf"\s*({_SIGNED})", re.VERBOSE)
_EXPRESSION = re.compile(
    rf"""\s*[:=$]?\s*([-+]?)\s*({_ATOM}
        (?:(?:{_OPERATOR}|[ \t]*=[ \t]*-?|[ \t]*(?=\\[a-zA-Z])|(?=[a-zA-Z(])){_ATOM}){{0,30}})
        (?=(?:{_UNIT})?(?![\w\u207a\u207b]))""",
    re.VERBOSE,
)
_BRACKETED = re.compile(r"\A[(\[]([^(),]*)[)\]]\Z")
_OPENING = r"(?:(?:\\left)?(?:\\?[(\[]|(?<!\\)[{|]|\$)|\\(?:text|mathrm)\{)"
_CLOSING = r"(?:(?:\\right)?(?:\\?[)\]]|[}|]|\$))"
_BRACKETS = rf"(?P<bracket>{_OPENING})\s*(?P<sign>{_DASH}?)[+]?\s*(?P<inner>{_NUMBER})\s*{_CLOSING}"
_NESTED = re.compile(rf"(?<=[(\[{{|$]){_BRACKETS}(?=[)\]}}|$]|\\[)\]])", re.VERBOSE)
_NEGATED = re.compile(
    rf"(?<![\^_]){_DASH}[ \t]*{_BRACKETS}(?![\w^!(\[{{]|\\[a-zA-Z(\[])", re.VERBOSE
)
# Numbers that stand alone are what is left when operands (`more` is what an operator joins to the
# first), numbers in a formula and numbers in a word are taken out of a text.
_TOKENS = re.compile(
    rf"""
    (?P<operand> (?: (?<=\w) | [)\]}}%][ \t]* ) {_DASH}+ [ \t]* {_NUMBER}
        | (?: [±∓] | \\pm\b | \\mp\b ) [ \t]* {_NUMBER} )
    | (?P<number> (?<![\w.^√)\]}}{_DASHES}\u207b\u208b-]) {_SIGNED}
        (?P<more> (?: (?: {_OPERATOR} | [.,:] ) {_SIGNED} )* ) )
    | (?P<formula> (?: \\(?:[dt]?frac|sqrt)\s?(?:\[\w*\])?(?:\{{[^{{}}]{{0,99}}\}}|[ ]?\w){{1,2}}
        | \\?\b(?:{_NAMES})[ ]?\([^()]{{0,99}}\)
        | {_DASH}[ \t]*{_OPENING}\s*{_SIGNED}
        | [√∛∜][ \t]*(?:\([^()]{{0,99}}\)|\{{[^{{}}]{{0,99}}\}}|[\d.]+|\w)
        | [_^]\{{[^{{}}]{{0,99}}\}} )
        (?: {_OPERATOR} {_SIGNED} )* )
    | (?P<word> [^\W\d]\w*(?:{_DASH}\w+)* )
    """,
    re.VERBOSE,
)
_BULLET = re.compile(
    rf"^[ \t]*(?:{_DASH}|[+*•])[ \t]+(?=(?:\\?[(\[]|\\text\{{)?(?:{_CURRENCY})?"
    r"(?:\.?\d|\\[dt]?frac\W*\d)[^\n]*(?<![\\a-zA-Z])[^\W\d_]{2})",
    re.MULTILINE,
)
_MINUS_WORD = re.compile(
    rf"\b(?:minus|negative)[ \t]+(?={_OPENING}?\s*(?:{_CURRENCY})?\.?\d)", re.I
)
_PUNCTUATION = re.compile(
    rf"((?<![\\\w])[^\W\d_](?:[^\W\d_]|['\u2019]){{0,40}}[^\W\d_][)\]\"'\u201d\u2019]*)"
    rf"(?:[^\S\n]+[{_DASHES}][^\S\n]+|[\u2014\u2015][^\S\n]*)"
)
_MAX_LINE = 200
_GAP = (
    r"(?:[\s$€£¥₹(\[{}*_`]|\\[$(\[{)\]]"
    r"|\\[a-zA-Z]++\*?(?:\[\w{0,20}\])?(?:\s?\{[^{}\\]{0,20}\})?(?:\d+[a-z]{2})?)*+"
)
"""Characters between a minus and the box that it belongs to: blanks, brackets and commands."""
_DASH_BEFORE = re.compile(rf"(?P<dash>-|\b(?:minus|(?<!-)negative))(?P<gap>{_GAP})\Z", re.I)
_COPULAS = (
    "is|are|be|was|equals?|becomes?|means?|gives?|gets?|yields?|produces?|returns?|leaves?|makes?"
    "|to|as|so|then|thus|therefore|hence|or|and|est|ist|es|é|è|是|为"
)
"""Words behind which a minus between blanks is a sign; behind others it is a dash."""
_NOUN = rf"(?!(?:{_COPULAS}|the|an?|we|i|you|it|they|this|that|which)\b)[^\W\d_]{{1,40}}"
_SYMBOLS = (
    r"alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|kappa|lambda|mu|nu|xi|pi|rho"
    r"|sigma|tau|(?:var)?phi|chi|psi|omega|infty|ell|hbar|[cl]?dots"
    r"|circ|degree|prime|top|ast|star|dagger|r(?:floor|ceil|vert|angle)|[vV]ert"
    r"|emptyset|varnothing|partial|nabla|iota|upsilon|var(?:rho|sigma|pi)"
)
_OPERAND = re.compile(
    r"(?:[\d)\]}%!\u00b0|'\u2032\u00b2\u00b3\u221e]|\d\s?[€£¥₹]|(?<![^\W\d_])[a-zA-Z\u03b1-\u03c9]"
    rf"|\\(?:{_SYMBOLS})|[\d$][ \t]*{_NOUN}(?:[ \t]+{_NOUN}){{0,3}})\Z",
    re.IGNORECASE,
)
"""What a minus behind it is subtracted from: 10, x, \\pi, (a + b), 5!, 10 red apples"""
_FORMULA = re.compile(r"(?:\\[(\[]|(?<!\S)\${1,2}|\\begin\{[a-z]{1,20}\*?\}(?:\{[^{}]{0,20}\})?)\Z")
"""Beginning of a formula: $ with nothing before it but a blank."""
_OPENED = re.compile(r"(?<!\S)(?:\*{2,3}|_{2,3})(?=\$*\Z)")
"""Marks of bold text that begins with the minus."""
_WORDS = re.compile(r"\\(?:text|mbox|mathrm)[a-z]{0,6}\{([^{}]*)\}\Z")
_LAST_WORD = re.compile(r"(?<![\w-])[^\W\d_]+\Z")
_RELATION = re.compile(r"\\[a-zA-Z]+\Z")
"""Commands that are no operand: \\approx, \\implies, \\cdot."""
_LIST_MARK = re.compile(r"(?:[*+\u2022-]|\(?(?:\d{1,3}|[a-z])[.)])\Z")
_UNSPACED = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff"
"""Letters of languages that put no blank between words."""
_IS = "[\u662f\u4e3a\u70ba\u5f97\u306f\uc740\ub294\u4e8e\u65bc]"
_UNSPACED_IS = re.compile(rf"[{_UNSPACED}]{_IS}\Z")
_AT_NUMBER = re.compile(rf"(?<=[{_UNSPACED}])(?=\d)|(?<=\d)(?=[{_UNSPACED}])|(?<={_IS})(?=-\d)")
_PRODUCT = re.compile(rf"[=+*/(<>-]\s*(?!(?:{_COPULAS})\Z)[a-zA-Z]{{2,4}}\Z", re.IGNORECASE)
"""Variables behind an operator: the end of AC = AB."""
_ELLIPSIS = re.compile(r"(?<![\d.])\.{2,}(?=\d)")
_AROUND = ' \t\n=\u2248:;,.\u2026"\u201c\u201d'
_BEFORE = re.compile(rf"\A(?:(?!(?<!\.)\.\d)[{_AROUND}])+")  # the dot of .5 stays
_WORD = re.compile(rf"[^\W\d_]{{2,}}|[{_UNSPACED}]|\u00b0\s?[CF]\b")
_COMMAND = re.compile(r"\\(?![dt]?frac)[a-zA-Z]")
_CHOICE = re.compile(r"\d\W*\s(?:or|to)\s\W*\d|\d\s*(?:\u6216|\u5230|\u81f3|\ub610\ub294)\s*\d")


def last_number(text: str) -> str | None:
    """Return the last number that stands alone in a text, with its sign; None without one.

    A dash before a number is its sign, with or without a blank between them, and also before
    brackets around it: -(3). It is none
    - in a word (COVID-19), between two numbers (3-5, 2020\u20132024, 10 - 7) or behind a bracket:
      what such a dash joins is no number, and neither is what another operator joins;
    - at the beginning of a line, with a blank, where words follow the number: that is a bullet;
    - where it is an en or em dash between blanks behind a word, or an em dash that follows a word
      at once: that is punctuation.
    """
    text = _PUNCTUATION.sub(r"\1 ", without_emphasis(text))
    text = _AT_NUMBER.sub(" ", _ELLIPSIS.sub("\u2026", plain_characters(text)))
    text = _without_brackets(_MINUS_WORD.sub("-", _BULLET.sub("", text)))
    tokens = _TOKENS.finditer(text)
    alone = [token["number"] for token in tokens if token["number"] and not token["more"]]
    return _signed(alone[-1]) if alone else None


def leading_expression(text: str) -> str | None:
    """Return the number, letter or short formula that a text begins with; None without one."""
    found = _EXPRESSION.match(plain_characters(without_emphasis(text)))
    return found and found[1] + _BRACKETED.sub(r"\1", found[2])


def boxed_with_sign(before: str, boxed: str, after: str) -> str:
    r"""Return what is in a box, with the minus that stands before it: -\boxed{3} is -3.

    Args:
        before: the text before the box.
        boxed: what is in the box.
        after: the text behind the box; words there make a dash that begins the line a bullet.
    """
    line = without_emphasis(before.rstrip("\n").rpartition("\n")[2][-_MAX_LINE:])
    line += before[-1:] if before.endswith("\n") else ""
    line = plain_characters(_PUNCTUATION.sub(r"\1 ", line + " ") if line[-1:].isspace() else line)
    words = _WORD.search(after.partition("\n")[0][:_MAX_LINE])
    dash = _DASH_BEFORE.search(line)
    if dash is None or not _is_sign(line[: dash.start()], dash, bullet=words is not None):
        return boxed
    if is_number(boxed):
        return last_number(f"-({boxed})") or boxed
    return boxed if line[-1:].isspace() else f"-({boxed})"


def _is_sign(before: str, dash: re.Match[str], *, bullet: bool) -> bool:
    """Return whether a dash is the sign of what follows, and not a minus, a bullet or a hyphen."""
    spaced = bool(re.search(r"\s", dash["gap"]))
    behind = _OPENED.sub("", before.rstrip())
    formula = _FORMULA.search(behind)
    if formula and not dash["gap"].startswith(("$", r"\)", r"\]")):
        return True  # it begins a formula
    if formula:  # which is nothing but the dash
        behind = behind[: formula.start()].rstrip()
    behind = _WORDS.sub(r" \1", behind.rstrip("$")).rstrip()
    if not behind:
        return not (bullet and spaced)
    marked = _LIST_MARK.fullmatch(behind) and not spaced
    if marked or dash["dash"].lower() == "negative" or _UNSPACED_IS.search(behind):
        return True
    if behind[-1] in "-+*/" or _OPERAND.search(behind) or _PRODUCT.search(behind):
        return False
    if _RELATION.search(behind):
        return True
    word = _LAST_WORD.search(behind)
    if word is None:
        return not behind[-1].isalnum()
    attached = dash["dash"] == "-" and not spaced
    return behind != before and (attached or re.fullmatch(_COPULAS, word[0], re.I) is not None)


def is_number(text: str) -> bool:
    """Return whether a text is one number and nothing else."""
    return _LEADING.fullmatch(plain_characters(text).rstrip()) is not None


def number_of(answer: str) -> str:
    """Return the last number of an answer in words.

    An expression stays as it is, and so does an answer that leaves a choice: 3 or 5, 3 to 5.
    """
    answer = _BEFORE.sub("", _LOOKS.sub(r"\1", answer).rstrip(_AROUND))
    words = {word.lower() for word in _WORD.findall(answer)} - {"frac", "dfrac", "tfrac"}
    if not words or words & _FUNCTIONS or _COMMAND.search(answer) or _CHOICE.search(answer):
        return answer
    return last_number(answer) or answer


def _without_brackets(text: str) -> str:
    """Return a text whose minus signs stand at their numbers: -(3), -\\(3\\) and -{3} are -3."""
    return _NEGATED.sub(_negated, _NESTED.sub(r"\g<sign>\g<inner>", text))


def _negated(number: re.Match[str]) -> str:
    twice = number["sign"] and "|" not in number["bracket"]
    return ("+" if twice else "-") + number["inner"]


def _signed(number: str) -> str:
    digits = number.lstrip(f"+-{_DASHES} \t")
    return digits if number[0] in ("+", digits[0]) else f"-{digits}"
