"""`calculator`: safe arithmetic, the small example of a tool.

The expression is parsed, never evaluated as Python; only numbers, operators and the functions named
here have a meaning, and results are bounded before they are computed.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from agent_r1.tools.base import Arguments, CallContext, Tool

MAX_CHARS = 500
MAX_DEPTH = 50
MAX_BITS = 10_000
"""Longest integer computed, in bits: about 3000 digits."""
MAX_DIGITS = 300
# Signs that models write: multiplication, division, minus.
_SIGNS = str.maketrans({"^": "**", "\u00d7": "*", "\u00f7": "/", "\u2212": "-"})

Number = int | float


def _round(value: Number, digits: Number = 0) -> Number:
    # round(5, -10 ** 9) would compute that power of ten.
    if not isinstance(digits, int) or abs(digits) > MAX_DIGITS:
        raise ValueError(f"digits ({digits}) must be a whole number within ±{MAX_DIGITS}")
    return round(value, digits)


_OPERATORS: dict[type[ast.AST], tuple[str, Callable[..., Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
    ast.UAdd: ("+", operator.pos),
    ast.USub: ("-", operator.neg),
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log10", "log2")},
    **{name: getattr(math, name) for name in ("sin", "cos", "tan")},
    **{name: getattr(math, name) for name in ("floor", "ceil", "gcd", "lcm")},
}


class Calculator(Tool):
    """Computes an arithmetic expression."""

    name = "calculator"
    description = (
        "Computes an arithmetic expression: + - * / // % **, parentheses, pi, e and the functions "
        f"{', '.join(_FUNCTIONS)}."
    )
    parameters = {
        "type": "object",
        "properties": {
            "expression": {"type": "string", "description": "For example: (3 + 4) * sqrt(2)"}
        },
        "required": ["expression"],
        "additionalProperties": False,
    }

    async def call(self, arguments: Arguments, context: CallContext) -> str:
        """Compute `expression`.

        Raises:
            ValueError: it is not arithmetic, or its result has no bounds.
        """
        return format_number(compute(str(arguments["expression"])))


def compute(expression: str) -> Number:
    """Return the value of an arithmetic expression.

    Raises:
        ValueError: it is not one, it divides by zero, or it is too large; the text says which.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(
            f"the expression has {len(expression)} characters; the limit is {MAX_CHARS}; "
            "compute it in parts"
        )
    try:
        tree = ast.parse(expression.translate(_SIGNS).strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as exc:
        raise ValueError(
            f"{expression!r} is not an arithmetic expression; write for example (3 + 4) * 2"
        ) from exc
    try:
        return _evaluate(tree.body, MAX_DEPTH)
    except ZeroDivisionError as exc:
        raise ValueError("division by zero") from exc
    except OverflowError as exc:
        raise ValueError("the result is too large for a floating point number") from exc


def format_number(value: Number) -> str:
    """Return a number as the model reads it: 15 significant digits, no trailing zeros."""
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.15g}"


def _evaluate(node: ast.expr, depth: int) -> Number:
    if depth == 0:
        raise ValueError(f"parentheses are nested deeper than {MAX_DEPTH}; compute it in parts")
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return _bound(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)][1](_evaluate(operand, depth - 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _apply(op, _evaluate(left, depth - 1), _evaluate(right, depth - 1))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _call(name, [_evaluate(argument, depth - 1) for argument in args])
    raise ValueError(
        f"{ast.unparse(node)!r} is not arithmetic; known are numbers, "
        f"{' '.join(dict.fromkeys(sign for sign, _ in _OPERATORS.values()))}, parentheses, "
        f"{', '.join((*_CONSTANTS, *_FUNCTIONS))}"
    )


def _apply(op: ast.operator, left: Number, right: Number) -> Number:
    if isinstance(op, ast.Pow):
        _check_power(left, right)
    return _bound(_OPERATORS[type(op)][1](left, right))


def _check_power(base: Number, exponent: Number) -> None:
    """Refuse a power before it is computed: 9 ** 9 ** 9 would never end."""
    if isinstance(base, int) and isinstance(exponent, int):
        bits = base.bit_length() * abs(exponent)
        if bits > MAX_BITS and abs(base) > 1:
            raise ValueError(
                f"{base} ** {exponent} is too large; results have at most {MAX_BITS} bits"
                if max(base.bit_length(), exponent.bit_length()) < 64
                else f"the power is too large; results have at most {MAX_BITS} bits"
            )


def _call(name: str, arguments: list[Number]) -> Number:
    try:
        return _bound(_FUNCTIONS[name](*arguments))
    except (TypeError, ValueError) as exc:
        raise ValueError(f"{name}({', '.join(map(str, arguments))}): {exc}") from exc


def _bound(value: Any) -> Number:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"the result is too large; results have at most {MAX_BITS} bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the result is too large for a floating point number")
    return value
