"""The tokenizer: bytes, plus one token for every word, name, operator and number of the example.

`init_model.py` saves it into the model directory, where AutoTokenizer finds it. A line of a program
is written as JSON has it, so that its newline is two characters; with the indentation they are one
token. Python's errors are split into words.
"""

import re

from exercises import MAX_VALUE
from operations import FORMS, OPERATIONS, RETURN_LIST
from programmers import DONE
from transformers import Qwen2Tokenizer
from trials import FAILED, PASSED

from agent_r1.examples.small_model import MARKUP, ROLE_WORDS, SHORT_TEMPLATE, make_tokenizer

MARKERS = (
    '{"name":"python_exec","arguments":{"code":"def f(x):',
    r"\n ",
    '"}}',
    DONE,
    " Write f(x): ",
    "f([",
    " is ",
    ", not ",
    ", ",
)
"""Scaffolding of a task, a call and its answer, one token each."""
ERRORS = (
    "TypeError: unsupported operand type(s) for + 'int' and 'list'",
    "TypeError: not all arguments converted during string formatting",
    "TypeError: can't multiply sequence by non-int of type 'str'",
    "TypeError: '>' not supported between instances of 'NoneType' and 'int'",
    "TypeError: '>=' and '<'",
    'TypeError: can only concatenate list (not "int") to list',
    "TypeError: list.count() takes exactly one argument (0 given)",
    "TypeError: 'NoneType' object is not iterable",
    "TypeError: object of type 'NoneType' has no len()",
    "TypeError: int() must be a string, a bytes-like object or a real number, not 'list'",
    "AttributeError: 'NoneType' object has no attribute 'reverse'",
    "NameError: name 'v' is not defined",
    "IndexError: list index out of range",
    "ValueError: max() arg is an empty sequence",
    "TypeError: 'NoneType' object is not subscriptable",
)
"""The words of Python's messages about common mistakes."""


def vocabulary() -> list[str]:
    """All texts that get a token of their own, but for markup."""
    lines = [line for one in OPERATIONS for line in (one.text, one.line, one.mistake)]
    texts = [*lines, *(form.line for form in FORMS), RETURN_LIST, *ERRORS, PASSED, FAILED]
    words = {word for text in texts for word in re.findall(r" ?(?:\w+|[%*+<>=!]+)", text)}
    numbers = {str(number) for number in range(MAX_VALUE + 1)}
    return sorted(word for word in words | numbers if len(word) > 1) + list(ROLE_WORDS)


def build_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer; its length is the model's vocabulary size, without unused ids."""
    return make_tokenizer([*MARKUP, *MARKERS, *vocabulary()], SHORT_TEMPLATE, 1024)
