"""Forms of numbers: the last number of a text with its sign, and answers as LaTeX."""

from __future__ import annotations

import time

import pytest

from agent_r1.reward.math_forms import (
    as_latex,
    last_number,
    leading_expression,
    number_of,
    plain_characters,
    without_emphasis,
)

MINUS_FORMS = [
    "-",
    "\u2212",  # minus
    "\u2010",  # hyphen
    "\u2011",  # hyphen that does not break
    "\u2012",  # figure dash
    "\u2013",  # en dash
    "\u2014",  # em dash
    "\u2015",  # bar
    "\u02d7",  # modifier
    "\u2796",  # heavy minus
    "\ufe58",  # small em dash
    "\ufe63",  # small hyphen-minus
    "\uff0d",  # wide hyphen-minus
]


PUNCTUATION = ["\u2013", "\u2014", "\u2015"]


@pytest.mark.parametrize("minus", MINUS_FORMS)
@pytest.mark.parametrize("blank", ["", " ", "\u00a0"])
def test_a_dash_before_a_number_is_its_sign(minus: str, blank: str):
    for text in ("the answer is: {}3.", "x = {}3", "({}3)", "{}3", "**{}3**"):
        assert last_number(text.format(minus + blank)) == "-3"
    if not (blank and minus in PUNCTUATION):
        assert last_number(f"the answer is {minus}{blank}3") == "-3"


@pytest.mark.parametrize("dash", PUNCTUATION)
def test_a_long_dash_between_blanks_behind_a_word_is_punctuation(dash: str):
    for text in (
        "Answer {} 42",
        "**Answer** {} 42",
        "It's {} 42",
        "Cost (in euros) {} **42**",
        "It is {} $42$.",
    ):
        assert last_number(text.format(dash)) in ("42", "$42")
    assert number_of(f"Answer {dash} 42") == "42"
    assert last_number(f"Answer {dash}42") == "-42"
    assert last_number(f"Answer: {dash} 42") == "-42"
    assert last_number(f"{dash} 42") == "-42"


@pytest.mark.parametrize("dash", ["\u2014", "\u2015"])
def test_an_em_dash_that_follows_a_word_at_once_is_punctuation(dash: str):
    for text in (
        "Final answer{}73.",
        "Final answer{} 73.",
        "**Answer**{}**73**",
        "The answer (in cm){}73{}is right",
    ):
        assert last_number(text.format(dash, dash)) == "73"
    assert last_number(f"x = {dash}73") == "-73"
    assert last_number(f"from 3{dash}5") is None


@pytest.mark.parametrize("minus", MINUS_FORMS)
def test_a_sign_before_brackets_is_the_numbers(minus: str):
    for text in (
        "{}(3)",
        "{}{{3}}",
        "{}[3]",
        "{}\\(3\\)",
        "{}$3$",
        "{}((3))",
        "{}\\left(3\\right)",
    ):
        assert last_number("so " + text.format(minus)) == "-3"
        assert last_number(text.format(minus)) == "-3"
    assert last_number(f"the answer is {minus}**(3)**") == "-3"
    assert last_number(f"it is {minus}(1/2).") == "-1/2"
    assert last_number(f"it is {minus}({minus}3)") == "3"
    assert last_number(f"it is {minus}|{minus}3|") == "-3"
    assert last_number(f"it is {minus}(3)^2") is None
    assert last_number(f"10 {minus} (7)") is None
    assert last_number("negative (3)") == "-3"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-$3", "-$3"),
        ("$-3", "-3"),
        (r"it lost -\$3", r"-\$3"),
        ("it lost -€3.50", "-€3.50"),
        ("it is -**3**", "-3"),
        ("it is $-3$", "-3"),
        ("-.5", "-.5"),
        (r"so $-\frac{1}{2}$", r"-\frac{1}{2}"),
        ("minus 3", "-3"),
        ("The answer is negative 3.", "-3"),
        ("+3", "3"),
        ("\uff0b\uff13", "3"),
        ("-1.5e-3", "-1.5e-3"),
        (r"-2 \times 10^{-3}", r"-2 \times 10^{-3}"),
    ],
)
def test_a_number_is_never_taken_without_its_sign(text: str, number: str):
    assert last_number(text) == number


HIDDEN_MINUS = [
    r"-\,3",
    r"-\ 3",
    r"-\;3",
    r"-\quad 3",
    r"-\displaystyle 3",
    "-~3",
    "-\u200b3",
    "\u2212\u20603",
    "\u2796\ufe0f3",
    "**-**3",
    "**\u2212** 3",
    "`-`3",
    "&minus;3",
    "&#8722;3",
    "&ndash;3",
    "-&nbsp;3",
    "-\u2009\u200a3",
    "{-}3",
    r"\text{-}3",
    "<b>-</b>3",
    '-<span class="x">3</span>',
]


@pytest.mark.parametrize("written", HIDDEN_MINUS)
def test_what_stands_between_a_sign_and_its_number_takes_no_sign(written: str):
    for text in ("{}", "the answer is {}", "the answer is {}.", "x = {}", "${}$"):
        assert (last_number(text.format(written)) or "").strip("$") == "-3"


@pytest.mark.parametrize(
    "text", [r"10 -\,3", "10 **-** 3", "10 &minus; 3", "10 -\u200b3", "10-~3", r"f(x)-\,3"]
)
def test_what_stands_between_a_sign_and_its_number_joins_no_less(text: str):
    assert last_number(text) is None


@pytest.mark.parametrize("dash", MINUS_FORMS)
def test_a_dash_between_two_numbers_joins_them_and_neither_is_the_answer(dash: str):
    for text in ("3{}5", "2020 {} 2024", "10{} 7", "$5 {} $3", "50% {} 3", "1{}2{}3"):
        assert last_number(f"it is {text.format(*[dash] * 2)}.") is None
    assert last_number(f"5 boxes, 3{dash}4 a day") == "5"
    assert last_number(f"10 {dash} 7 = 3") == "3"
    assert last_number(f"10 minus 7 is 3, and 4{dash}1 too") == "3"


@pytest.mark.parametrize("dash", MINUS_FORMS)
def test_a_number_in_a_word_is_none(dash: str):
    if dash not in ("\u2014", "\u2015"):  # they join no words
        assert last_number(f"COVID{dash}19") is None
        assert last_number(f"7 cases of COVID{dash}19") == "7"
    assert last_number(f"f(x){dash}3") is None
    assert last_number(f"a 12{dash}inch ruler") == "12"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("- 3 apples", "3"),
        ("We have:\n- 3 apples\n  - **4** pears", "4"),
        ("\u2022 3 apples", "3"),
        ("* 3 apples", "3"),
        ("- $3 each", "$3"),
        ("- .5 is the answer", ".5"),
        (r"- \frac{3}{4} is the answer", r"\frac{3}{4}"),
        (r"- $\frac{3}{4}$ is the answer", r"$\frac{3}{4}"),
        (r"- \(5\) is the answer", "5"),
        (r"- \text{5} is the answer", "5"),
        ("- \u00bd is the answer", "1/2"),
        ("- 3", "-3"),  # no words: the line is the number
        ("- .5", "-.5"),
        (r"- \frac{3}{4}", r"-\frac{3}{4}"),
        (r"- 2 \times 10^{3}", r"-2 \times 10^{3}"),
        ("-3 degrees", "-3"),  # no blank
        ("it is - 3 degrees", "-3"),  # not the beginning of a line
    ],
)
def test_a_dash_that_begins_a_line_with_words_is_a_bullet(text: str, number: str):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("11 5/6", "11 5/6"),
        ("it is 11\u00bd", "11 1/2"),
        ("it is \u00be of it", "3/4"),
        (r"it is 11\frac{5}{6}", r"11\frac{5}{6}"),
        ("it is 1e6", "1e6"),
        ("it is 1.5 \u00d7 10^3", "1.5 \u00d7 10^3"),
        ("it is 10^6", "10^6"),
        ("73 m^2", "73"),
        ("73 m^{2}", "73"),
        (r"73 and \sqrt{2}", "73"),
        (r"\frac{x}{2}", None),
        ("\u221a2", None),
        ("\u00b13", None),
        (r"\pm 3", None),
        ("3 + 4", None),
        ("3 * 4", None),
        ("12:30", None),
        ("(1,2)", None),
        ("1,73", None),
        ("Python 3.11.2", None),
        ("5/6/2024", None),
        ("__73__", "73"),
        ("_73_", "73"),
        ("`73`", "73"),
        ("\uff17\uff13", "73"),
        ("\u0667\u0663", "73"),  # Arabic digits
        ("50 %", "50 %"),
        ("x9", None),
        ("0.6 or 60%", "60%"),
        ("12 kg, or 12kg", "12"),
        ("1.2*60 = 72Mb", "72"),
        ("73cm\u00b2", "73"),
        ("so 1 234 567", "1 234 567"),
        ("so 1\u202f234", "1 234"),
        ("so 1'234", "1'234"),
        ("so 1_234", "1_234"),
        ("so 1{,}234", "1{,}234"),
        (r"so 1\,234", "1 234"),
        ("so 1 2345", "2345"),
        ("in 2020 300 came", "300"),
        ("so 10**6", "10^{6}"),
        (r"so 10,\!080", "10,080"),
        (r"so \boldsymbol{73}.", "73"),
        (r"so \underline{\textbf{-73}}.", "-73"),
        ("It is 73\u2103.", "73"),
        ("10\u207b\u00b3", "10^{-3}"),
        ("so 10\u2076", "10^{6}"),
        ("2\u00b3", "2^{3}"),
        ("it is 1.5\u00d710\u2076", "1.5\u00d710^{6}"),
        ("it is 1.5\u00b710\u2076", "1.5\u00b710^{6}"),
        ("2 m\u00b3", "2"),
        ("3\u221a2", None),
        ("1.5 \u221a2", None),
        ("3\\sqrt{2}", None),
        (r"\sqrt 2", None),
        ("\u221b(2)", None),
        ("\u221a2 + 3", None),
        ("3*sqrt(2)", None),
        ("3 + \u221a2", None),
        ("3 \u03c0", None),
        (r"3\pi", None),
        ("3^x", None),
        ("(2)\u00b3", None),
        (r"6 \cdot 7", None),
        ("we need 7 log files", "7"),
        ("1.5x", None),
        (r"90^\circ", "90"),
        (r"so \frac12", r"\frac12"),
        (r"so -\dfrac 1{12}", r"-\dfrac 1{12}"),
        ("~~73~~", "73"),
        ("so it is .25", ".25"),
        ("so it is ...25", "25"),
        ("\u207b3", None),
        ("4x", None),
    ],
)
def test_the_last_number_stands_alone_and_is_whole(text: str, number: str | None):
    assert last_number(text) == number


def test_a_long_text_takes_no_time():
    started = time.process_time()
    for part in (
        "a'",
        "a\u2019",
        "-",
        "- ",
        "1",
        "1 ",
        "(",
        ") ",
        "*a ",
        "_",
        "`",
        "\u2014",
        "1-",
        "a-",
        "$",
        "- 1\n",
    ):
        last_number(part * (50_000 // len(part)) + "x")
    assert time.process_time() - started < 20  # a second or two; minutes, were it quadratic


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 42 is", "42"),
        ("42", "42"),
        (" \u22123", "-3"),
        (" - 3", "-3"),
        ("11 5/6.", "11 5/6"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\frac12", r"\frac12"),
        (r" -\frac 1 2", r"-\frac 1 2"),
        (" .5", ".5"),
        ("10\u2076", "10^{6}"),
        (". 42", None),
        ("42x is", "42x"),
        ("42nd", None),
    ],
)
def test_the_expression_that_a_text_begins_with(text: str, number: str | None):
    assert leading_expression(text) == number


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("The answer is 73.", "73"),
        ("73 (seventy-three)", "73"),
        ("73 apples", "73"),
        ("USD 73", "73"),
        (".5", ".5"),
        ("= .5", ".5"),
        (": .5.", ".5"),
        ("...5", "5"),
        ("The answer is .5.", ".5"),
        (r"The answer is \frac12", r"\frac12"),
        (r"\boldsymbol{73} apples", "73"),
        (r"{\bf 73} apples", "73"),
        ("The answer is \u2212(73)", "-73"),
        ("The answer is \u221273", "-73"),
        # Expressions stay what they are.
        ("x = 73", "x = 73"),
        ("3-5", "3-5"),
        ("sqrt(2)", "sqrt(2)"),
        ("3 pi", "3 pi"),
        (r"\sqrt{2}\text{ cm}", r"\sqrt{2}\text{ cm}"),
        # No number, or no one number.
        ("COVID-19", "COVID-19"),
        ("7 or 8", "7 or 8"),
        ("from 3 to 5", "from 3 to 5"),
        ("5 feet or 60 inches", "60"),
        ("= 73,", "73"),
        ("\u201c73\u201d", "73"),
        ("73!", "73!"),
        ("|-3|", "|-3|"),
        ("none", "none"),
    ],
)
def test_of_an_answer_in_words_the_last_number_counts(answer: str, number: str):
    assert number_of(answer) == number


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("**73**", "73"),
        ("*73*", "73"),
        ("***73***", "73"),
        ("__73__", "73"),
        ("**_73_**", "73"),
        ("`73`", "73"),
        ("~~73~~", "73"),
        ("\u2212**73**", "\u221273"),
        ("**73** apples", "73 apples"),
        ("a_1 + b_1", "a_1 + b_1"),
        ("2**3**2", "2**3**2"),
        ("2 * 3 * 4", "2 * 3 * 4"),
        ("x*y*z", "x*y*z"),
        ("(2)**(3)**(2)", "(2)**(3)**(2)"),
        ("x_{1}_", "x_{1}_"),
    ],
)
def test_marks_of_emphasis_go_and_operators_stay(text: str, bare: str):
    assert without_emphasis(text) == bare


def test_wide_characters_and_signs_become_ascii():
    assert (
        plain_characters("\uff0d\uff17\uff13\uff0e\uff15\uff05 \u22121 x \u2013 3")
        == "-73.5% -1 x - 3"
    )
    assert plain_characters("2020\u20132024 cm\u00b2 \u03c0") == "2020\u20132024 cm\u00b2 \u03c0"
    assert plain_characters("10\u00b2 x\u00b3 10\u207b\u00b9\u2070") == "10^{2} x^{3} 10^{-10}"
    assert plain_characters("1\u00bd") == "1 1/2"


@pytest.mark.parametrize(
    ("answer", "latex"),
    [
        ("11 5/6", r"11\frac{5}{6}"),
        ("-11 5/6 cm", r"-11\frac{5}{6} cm"),
        ("11\u00a05/6", r"11\frac{5}{6}"),
        (r"11~\frac{5}{6}", r"11 \frac{5}{6}"),
        ("5/6", "5/6"),
        ("1, 5/6", "1, 5/6"),
        ("1 5/6/7", "1 5/6/7"),
        ("1e6", r"1\times 10^{6}"),
        ("1.5e-3", r"1.5\times 10^{-3}"),
        ("2E+05", r"2\times 10^{5}"),
        ("1e9999", "1e9999"),  # too large to be a number that anybody means
        ("2e", "2e"),
        ("x1e6", "x1e6"),
        ("1.5x10^3", r"1.5\times 10^3"),
        ("1.5\u00d710\u2076", r"1.5\times 10^{6}"),
        ("3\u221a2", r"3\sqrt{2}"),
        ("\u221b(x+1)", r"\sqrt[3]{x+1}"),
        (r"-\(3\)", "-3"),
        ("-{3}", "-3"),
        ("x-(-3)", "x+3"),
        ("-(3)^2", "-(3)^2"),
        ("10^-{3}", "10^-{3}"),
        ("12_345", "12345"),
        ("x_123", "x_123"),
        ("\u20ac73", "73"),
        ("73 \u20ac", "73 "),
    ],
)
def test_numbers_become_latex(answer: str, latex: str):
    assert as_latex(answer).rstrip() == latex.rstrip()
