"""`math_equal`: finding the answer in a text, comparing it, and expressions that never end."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent_r1.reward.config import RewardConfig
from agent_r1.reward.math_equal import MathWorkers, math_answer, math_equal
from agent_r1.reward.math_forms import number_of
from agent_r1.reward.math_worker import same_mathematics
from agent_r1.reward.scorer import Scorer
from agent_r1_proto.rewards import ScoreRequest, ScoreTurn
from tests.support.builders import read_turn


@pytest.fixture(scope="module")
def workers() -> Iterator[MathWorkers]:
    workers = MathWorkers(2, wait_s=120.0)
    yield workers
    workers.close()


def request(text: str, *answers: str, **payload: Any) -> ScoreRequest:
    values: dict[str, Any] = {"answers": [*answers], **payload}
    return ScoreRequest(payload=values, turns=[read_turn(text)])


# -- finding the answer ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, then \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),
        (r"\boxed{1} and \boxed{2", "1"),  # the last one that closes
        (r"\boxed{1 + \boxed{2} {}}", "2"),
        (r"}} \boxed{a_{1}} {", "a_{1}"),
        (r"\boxed{" * 100_000 + r"\boxed{7}", "7"),
        (r"\boxed{" * 100_000, None),
        (r"\fbox {7}", "7"),
        (r"<answer>\boxed{4}</answer> \boxed{5}", "4"),
        ("<answer>$x+1$</answer>", "x+1"),
        (r"<answer>\(x\)</answer>", "x"),
        ("6 * 7\n#### 42\n", "42"),
        ("it is 42", None),
        (r"\boxed{}", None),
        (r"<think>\boxed{1}</think> so it is", None),
        (r"<think>\boxed{1}", None),  # a thought that never ended
        (r"<think>\boxed{1}</think>\boxed{2}", "2"),
        (r"2}\boxed{3}<|im_end|>", "3"),
        (r"so \boxed 42.", "42"),
        (r"so $\boxed42$", "42"),
        ("so \\boxed \u22123 apples", "-3"),
        (r"so \fbox 11 5/6", "11 5/6"),
        (r"so \boxed B", "B"),
        (r"so \boxed x.", "x"),
        (r"so \boxed\text{A}", r"\text{A}"),
        (r"so \boxed\sqrt2", r"\sqrt2"),
        (r"so \boxed\sqrt[3]{2}", r"\sqrt[3]{2}"),
        (r"so \boxed\sqrt x", r"\sqrt x"),
        (r"so \boxed\text A", r"\text A"),
        (r"so \boxed (A)", "A"),
        (r"so \boxed \pi", r"\pi"),
        ("put a \\boxed a around it", None),
        (r"\boxed 1, or \boxed{2}", "2"),  # braces say more
        (r"\boxed 1, or \boxed 2", "2"),
        (r"put it in \boxed please", None),
        (r"so \boxed \frac12.", r"\frac12"),
        # Without braces the short expression that follows is in it.
        (r"so \boxed (42).", "42"),
        (r"so \boxed(42)", "42"),
        (r"so $\boxed 2\pi$", r"2\pi"),
        (r"so \boxed 2\sqrt{3}.", r"2\sqrt{3}"),
        (r"so \boxed 2 + \sqrt{3} cm", r"2 + \sqrt{3}"),
        (r"so \boxed \frac{3\sqrt{2}}{2}", r"\frac{3\sqrt{2}}{2}"),
        (r"so $\boxed x^2+1$", "x^2+1"),
        (r"so \boxed x = 5.", "x = 5"),
        (r"so \boxed (1, 2]", "(1, 2]"),
        (r"so \boxed \{1, 2\}", r"\{1, 2\}"),
        (r"so \boxed 1,234.", "1,234"),
        (r"so \boxed **42**", "42"),
        (r"so \boxed 3 - that is all", "3"),
        (r"so \boxed 3 \quad and \end{align}", "3"),
        # The minus before a box belongs to what is in it, unless it subtracts or is a bullet.
        (r"-\boxed{3}", "-3"),
        ("x = $\u2212\\boxed{3}$", "-3"),
        (r"it is -\fbox{3}", "-3"),
        (r"it is -\boxed 3", "-3"),
        (r"minus \boxed{3}", "-3"),
        (r"-\boxed{-3}", "3"),
        (r"so -\boxed{2\pi}", r"-(2\pi)"),
        (r"<answer>-\boxed{3}</answer>", "-3"),
        (r"3 = 10 - \boxed{7}", "7"),
        (r"3 = x-\boxed{7}", "7"),
        ("Answer \u2013 \\boxed{7}", "7"),
        (r"- \boxed{7} apples", "7"),
        (r"Answer - \boxed{B}", "B"),
        ("Final answer\u2014\\boxed{7}", "7"),
        (r"\boxedx 42", None),
        ("<answer>**73**</answer>", "73"),
        (r"<answer>**$\boxed{73}$**</answer>", "73"),
        ("<answer>`73`</answer>", "73"),
        ("<answer>```\n73\n```</answer>", "73"),
        (r"\boxed{__73__}", "73"),
        ("#### **73**", "73"),
        ("**#### 73**", "73"),
        ("so\n#### 18\n\nDone in 3 steps.", "18"),
        ("#### 2. Multiply\nThe answer is 18.", None),  # a heading
        ("#### Final answer:\n73", None),
        ("##### 73", None),
    ],
)
def test_the_answer_is_the_last_one_outside_the_thought(text: str, answer: str | None):
    assert math_answer(read_turn(text)) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 makes 7.", "7"),
        ("That is $1,234.50 in all.", "$1,234.50"),
        ("minus: -3", "-3"),
        ("It is 1/2 of it", "1/2"),
        ("5 apples, no more than x9", "5"),
        ("none", None),
    ],
)
def test_the_last_number_will_do_where_the_task_asks_for_one(text: str, answer: str | None):
    assert math_answer(read_turn(text), number=True) == answer


NEGATIVE_BOXES = [
    r"-\boxed{3}",
    r"-{\boxed{3}}",
    r"-\left(\boxed{3}\right)",
    r"-\(\boxed{3}\)",
    r"-\[\boxed{3}\]",
    r"-**\boxed{3}**",
    r"-`\boxed{3}`",
    r"-\,\boxed{3}",
    r"-\ \boxed{3}",
    r"-~\boxed{3}",
    r"$-\displaystyle\boxed{3}$",
    r"-\text{\boxed{3}}",
    r"-\mathbf{\boxed{3}}",
    r"-[\boxed{3}]",
    r"-\bigl(\boxed{3}\bigr)",
    r"-$\boxed{3}$",
    r"**-**\boxed{3}",
    r"&minus;\boxed{3}",
    "-\u200b\\boxed{3}",
    r"-\color{red}{\boxed{3}}",
    r"-\underline{\boxed{3}}",
    r"-\hspace{1mm}\boxed{3}",
    r"-\left\{\boxed{3}\right\}",
    r"-<b>\boxed{3}</b>",
    r"{-}\boxed{3}",
    r"\text{-}\boxed{3}",
    r"minus $\boxed{3}$",
    r"-\,\boxed 3",
    r"-{}\boxed{3}",
    r"-\large\boxed{3}",
    r"-\medspace\boxed{3}",
    r"-\kern1pt\boxed{3}",
    r"-\textcolor[rgb]{1,0,0}{\boxed{3}}",
    r"-\colorbox{yellow}{$\boxed{3}$}",
    r"-\mathop{\boxed{3}}",
    r"-\hbox{\boxed{3}}",
    r"\(-\)\boxed{3}",
    r"$-$ \boxed{3}",
    r"\textminus\boxed{3}",
    r"\boldsymbol{-}\boxed{3}",
    r"\mbox{ - }\boxed{3}",
    "-\n\\boxed{3}",
    r"$x$ \approx -\boxed{3}",
    r"x \implies -\boxed{3}",
    r"\text{answer: } -\boxed{3}",
    r"answer: $-$ $\boxed{3}$",
    r"it has a negative \boxed{3}",
    r"at 5 is -\boxed{3}",
    r"f(2) equals -\boxed{3}",
    r"5 and -\boxed{3}",
    r"-\$\boxed{3}",
    "-\u20ac\\boxed{3}",
    "\u20ac-\\boxed{3}",
    r"$x \approx - \boxed{3}$",
    r"$x \le - \boxed{3}$",
    r"$x \implies -\ \boxed{3}$",
    r"$2 \cdot - \boxed{3}$",
    r"setting $x=2$ yields -$\boxed{3}$",
    r"$5-8$ produces - \boxed{3}",
    r"for $n = 5$ then - \boxed{3}",
    r"$5$ becomes - \boxed{3}",
    r"5 est -\boxed{3}",
    "\u7b54\u6848\u662f-\\boxed{3}",
    "x \u662f -\\boxed{3}",
    "La risposta \u00e8 -\\boxed{3}",
    r"Bob paid $13, leaving a balance of -\boxed{3}",
    r"It costs $5 each. Hence -\boxed{3}",
    r"**-\boxed{3}**",
    r"**$-\boxed{3}$**",
    r"**-\boxed 3**",
    r"<answer>**$-\boxed{3}$**</answer>",
    r"\begin{align*}-\boxed{3}\end{align*}",
    r"\begin{aligned} -\boxed{3}\end{aligned}",
    r"10 red apples give -\boxed{3}",
    r"for x = 5 we find -\boxed{3}",
]


@pytest.mark.parametrize("written", NEGATIVE_BOXES)
def test_a_box_keeps_the_minus_that_stands_before_it(written: str):
    for text in ("{}", "The answer is {}", "so $x =$ {}.", "for x = 5 it is {}", "7 - 10 = {}"):
        assert math_answer(read_turn(text.replace("{}", written))) == "-3"


@pytest.mark.parametrize(
    "text",
    [
        r"10 - (\boxed{3})",
        r"10-\left(\boxed{3}\right)",
        r"- \boxed{3} is the answer",
        r"- **\boxed{3}** is the answer",
        r"- $\boxed{3}$ is the answer",
        r"COVID-\,\boxed{3}",
        r"10{-}\boxed{3}",
        r"$10$ - \boxed{3}",
        r"10 cm - \boxed{3} cm",
        r"10 apples - \boxed{3} apples",
        r"5! - \boxed{3}",
        "10\u00b0 - \\boxed{3}\u00b0",
        r"|x| - \boxed{3}",
        r"$x^2$ - \boxed{3}",
        r"x minus \boxed{3}",
        r"it's non-negative: \boxed{3}",
        r"it's non-negative \boxed{3}",
        r"Final answer - \boxed{3}",
        r"\alpha - \boxed{3}",
        r"10 apples minus \boxed{3} apples",
        r"10 apples -\boxed{3}",
        r"10 red apples -\boxed{3}",
        r"20 blue and 5 very big red marbles -\boxed{3}",
        r"$10$ $-$ $\boxed{3}$",
        r"10 \(-\) \boxed{3}",
        r"$$10$$ - \boxed{3}",
        "10\u20ac - \\boxed{3}",
        "\u221e - \\boxed{3}",
        "---\n\\boxed{3}",
        "***\n\\boxed{3}",
        r"$180^\circ -\boxed{3}$",
        r"$AC = AB -\boxed{3}$",
        r"$y = mx -\boxed{3}$",
        r"$\lfloor x \rfloor -\boxed{3}$",
        r"$f^\prime -\boxed{3}$",
        r"$A^\top -\boxed{3}$",
        r"\(AC = AB -\boxed{3}\)",
        r"$$y = mx -\boxed{3}$$",
        r"$30^\circ\text{C} - \boxed{3}$",
        r"$\partial - \boxed{3}$",
        r"$x^\ast - \boxed{3}$",
        "50 \u20ac - \\boxed{3}",
        r"(b) - \boxed{3}",
        r"1) - \boxed{3}",
        "\u7b54\u6848 - \\boxed{3}",
        "\u603b\u4ef7-\\boxed{3}",
    ],
)
def test_a_dash_that_is_no_sign_does_not_get_into_a_box(text: str):
    assert math_answer(read_turn(text)) == "3"


@pytest.mark.parametrize("mark", ["* ", "(a) ", "1) ", "1. "])
def test_a_minus_behind_the_mark_of_a_list_is_a_sign(mark: str):
    assert math_answer(read_turn(mark + r"-\boxed{3}")) == "-3"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\u7b54\u6848\u662f73\u3002", "73"),
        ("\u7b54\u3048\u306f73\u3067\u3059", "73"),
        ("\ub2f5\uc740 73\uc785\ub2c8\ub2e4", "73"),
        ("73\u5143", "73"),
        ("\u7b54\u6848\u662f-73", "-73"),
        ("73\u00b0C", "73"),
        ("-73 \u00b0C", "-73"),
    ],
)
def test_a_number_stands_alone_beside_words_without_blanks(text: str, answer: str):
    assert math_answer(read_turn(text), number=True) == answer
    assert number_of(text) == answer


@pytest.mark.parametrize("part", [r"\a{}", r"\a {}", r"\kern1pt", r"\ ", "$", "{", "- ", "minus "])
def test_what_stands_before_a_box_takes_no_time(part: str):
    started = time.process_time()
    assert math_answer(read_turn("-" + part * 1000 + r"x\boxed{3}")) == "3"
    assert time.process_time() - started < 1


# -- comparing -------------------------------------------------------------------------------------

EQUAL = [
    ("204_5", "204_{5}"),
    (r"11,\! 111,\! 100", "11111100"),
    (r"\text{(E)}", r"\textbf{(E)}\ 5"),
    (r"\text{(E)}", r"\text{(E) } 5"),
    ("71/6", "11 5/6"),
    (r"\frac{71}{6}", "11\u00a05/6"),
    ("11 5/6", r"11\frac{5}{6}"),
    ("-71/6", "-11 5/6"),
    ("1.5", "1\u00bd"),
    ("0.75", "\u00be"),
    ("1000000", "1e6"),
    ("1e6", "10^6"),
    ("0.0015", "1.5e-3"),
    ("1500", "1.5x10^3"),
    ("1500000", "1.5\u00d710\u2076"),
    ("0.001", "10\u207b\u00b3"),
    ("8", "2\u00b3"),
    ("x^2", "x\u00b2"),
    (r"3\sqrt{2}", "3\u221a2"),
    ("0.5", ".5"),
    *(("-3", form) for form in ("-(3)", r"-\(3\)", "-{3}", "\u2212(3)", "-$3$")),
    ("73", "\uff17\uff13"),
    ("-3.5", "\uff0d\uff13\uff0e\uff15"),
    *(("-3", f"{minus}3") for minus in "\u2212\u2010\u2011\u2012\u2013\u2014\ufe63"),
    ("\u22123", "-3"),
    ("x-3", "x \u2013 3"),
    ("2020-2024", "2020\u20132024"),
    ("12345", "12_345"),
    ("73", "\u20ac73"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac12", r"\dfrac{1}{2}"),
    (r"1\frac{1}{2}", "1.5"),
    (r"3\pi", r"\pi \cdot 3"),
    (r"3\pi", r"\pi*3"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("x^2-1", "(x-1)(x+1)"),
    ("y=2x+3", "2x+3"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("[-2,7]", "[-2, 7]"),
    (r"x \in [-2,7]", "[-2,7]"),
    (r"(-\infty,3)\cup(3,\infty)", r"(-\infty, 3) \cup (3, \infty)"),
    (r"5\text{ cm}", "5"),
    ("5", "5 cm"),
    (r"10\%", "10"),
    *(("50", form) for form in ("50%", r"50\%", "(50)%", "+50%")),
    *(("-50", form) for form in ("-50%", r"-50\%", "\u221250 %", "-(50)%", "-(50%)", r"-\,50\%")),
    *(("-0.5", form) for form in ("-50%", r"-50\%")),
    ("-50%", "-50"),
    ("-3", r"-\,3"),
    ("-3", "&minus;3"),
    (r"90^\circ", "90"),
    (r"\$32,348", "32348"),
    ("1000", "1,000"),
    ("18", "18.00"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{(C)}", "C"),
    *(("A", form) for form in ("A)", "(A)", "A.", "(A).", r"\textbf{A)}", r"\text{A)}")),
    *(("1000000", form) for form in ("10**6", "10 ** 6", "(10)**(6)", r"10^6")),
    ("x^2", "x**2"),
    *(("73", rf"73{form}") for form in ("\\text{\u2103}", "\\text{ \u00b0C}", r"{}^\circ\text{C}")),
    (r"\frac{90}{2}", r"\frac{90^\circ}{2}"),
    *(("73", form) for form in ("73\u2103", "73\u2109", "73\u00b0C", "73\u00b0", "73 \u00b0F")),
    *(("73", rf"73{form}") for form in (r"^\circ C", r"^{\circ}\text{C}", r"^\circ\,\mathrm{F}")),
    *(("73", form) for form in ("=73", "73,", r"\bigl(73\bigr)", r"\ensuremath{73}")),
    *(("73", rf"\{name}{{73}}") for name in ("boldsymbol", "underline", "bm", "emph", "mathsf")),
    *(("73", rf"\{name} 73") for name in ("bf", "rm", "it", "Large", "displaystyle", "mathbf")),
    *(("73", rf"{form}") for form in (r"\color{red}73", r"\textcolor[rgb]{1,0,0}{73}")),
    ("-73", r"-\underline{\textbf{73}}"),
    (r"\frac{1}{2}", r"\boldsymbol{\frac{1}{2}}"),
    ("Evelyn", r"\boldsymbol{\text{Evelyn}}"),
    ("1234", r"1,\!234"),
    (r"\begin{pmatrix}1\\ 2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("6+9i", "9i+6"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
]
DIFFERENT = [
    ("204_5", "204_6"),
    ("4343_6", "4343_{7}"),
    (r"\text{(E)}", "(D) 5"),
    ("(E)", "(E) + 1"),
    *(("3", form) for form in ("-(3)", r"-\(3\)", "-{3}", "\u2212(3)", "-$3$")),
    ("3", "3\u221a2"),
    ("5", ".5"),
    ("55/6", "11 5/6"),
    ("5/6", "11 5/6"),
    ("115/6", "11 5/6"),
    ("2/3", "1\u00bd"),
    ("6", "1e6"),
    ("1", "1e6"),
    ("1000000", "1e5"),
    ("0.015", "1.5e-3"),
    ("37", "\uff17\uff13"),
    *(("3", f"{minus}3") for minus in "\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d"),
    ("-4", "2020\u20132024"),
    ("4", "2020\u20132024"),
    ("2024", "2020\u20132024"),
    ("345", "12_345"),
    (r"\frac{1}{2}", "0.51"),
    ("1/3", "0.333"),
    (r"3\pi", "9.42"),
    ("(1,2)", "(2,1)"),
    ("[-2,7]", "(-2,7)"),
    (r"\text{Evelyn}", r"\text{Bob}"),
    ("even", "odd"),
    *(("50", form) for form in ("-50%", "5%", "0.5%")),
    *(("-50", form) for form in ("50%", "-5%", "-0.5%")),
    *(("3", form) for form in (r"-\,3", "-~3", "&minus;3", "-\u200b3")),
    ("B", "A)"),
    *(("6", form) for form in ("10**6", "x**6")),
    *(("37", form) for form in ("73\u2103", r"73^\circ C", r"\bf 73", r"\underline{73}")),
    *(("73", form) for form in ("-73\u2103", r"-\underline{73}", r"\overline{73}")),
    ("x+1", "x-1"),
    ("18", "-18"),
    ("2k", "2n"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
]


@pytest.mark.parametrize(
    ("answer", "prediction", "expected"),
    [(*pair, True) for pair in EQUAL] + [(*pair, False) for pair in DIFFERENT],
)
def test_equal_as_mathematics(workers: MathWorkers, answer: str, prediction: str, expected: bool):
    assert workers.equal([answer], prediction) is expected


def test_one_of_several_answers_is_enough(workers: MathWorkers):
    assert workers.equal(["4", r"\frac{1}{2}"], "0.5")
    assert not workers.equal(["4", "5"], "0.5")


@pytest.mark.parametrize(
    "prediction",
    [
        "",
        "}{",
        "\\",
        "\\frac{1}{",
        "\x00",
        "é中",
        "[" * 50,
        "x" * 2000,
        "\\boxed{1}",
        "1\n2",
        "$$",
    ],
)
def test_anything_a_model_writes_is_compared_without_an_error(
    workers: MathWorkers, prediction: str
):
    assert workers.equal(["17"], prediction) is False


def test_code_in_an_answer_is_never_evaluated(workers: MathWorkers, tmp_path: Path):
    trace = tmp_path / "trace"
    for code in (
        f"__import__('pathlib').Path('{trace}').touch()",
        f"open('{trace}','w')",
        rf"\text{{open('{trace}','w')}}",
        f"1 + open('{trace}','w')",
    ):
        assert not workers.equal(["17"], code)
    assert not trace.exists()


# -- expressions that never end --------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_worker() -> Iterator[MathWorkers]:
    workers = MathWorkers(1, cpu_s=1.0, wait_s=120.0)
    yield workers
    workers.close()


@pytest.mark.parametrize("prediction", ["9^{9^{9^{9}}}", "(9^{99999999})!", "10^{10^{10}}+1"])
def test_an_expression_too_large_is_wrong_and_the_next_is_compared(
    one_worker: MathWorkers, prediction: str
):
    assert one_worker.equal(["17"], prediction) is False
    assert one_worker.equal(["17"], "17.0") is True


def test_many_threads_share_the_workers_and_a_hopeless_one_holds_up_nobody_for_long():
    workers = MathWorkers(2, cpu_s=1.0, wait_s=120.0)
    try:
        with ThreadPoolExecutor(16) as threads:
            hopeless = threads.submit(workers.equal, ["17"], "9^{9^{9^{9}}}")
            verdicts = list(
                threads.map(lambda n: workers.equal([str(n)], f"{2 * n}/2"), range(100))
            )
            assert all(verdicts)
            assert hopeless.result() is False
    finally:
        workers.close()


def test_a_machine_too_busy_is_an_error_and_never_a_wrong_answer():
    workers = MathWorkers(1, cpu_s=60.0, wait_s=0.01)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"too busy: lower reward\.max_concurrent"):
        workers.equal(["17"], "9^{9^{9^{9}}}")
    assert time.monotonic() - started < 10
    workers.close()


# -- as a component --------------------------------------------------------------------------------


async def test_the_component_scores_the_last_turn():
    scorer = Scorer(RewardConfig(components={"math_equal": 1.0}))
    reward = await scorer.score(request(r"so \boxed{0.5}", r"\frac{1}{2}"))
    assert (reward.total, reward.components["math_equal"]) == (1.0, 1.0)
    assert (await scorer.score(request("so 0.5", r"\frac{1}{2}"))).total == 0.0
    number = request("so $1,234.50", "1234.5", answer_type="number")
    assert (await scorer.score(number)).total == 1.0


NUMBERS = [
    # gold, text, score
    ("73", "<answer>The answer is 73.</answer>", 1.0),
    ("73", "<answer>73 (seventy-three)</answer>", 1.0),
    ("73", r"\boxed{The answer is 73}", 1.0),
    ("73", "<answer>USD 73</answer>", 1.0),
    ("73", "<answer>It is **73**, not 72.</answer>", 0.0),  # the last number counts
    ("72", "<answer>The answer is 73.</answer>", 0.0),
    ("3", "<answer>The answer is -3.</answer>", 0.0),
    ("-3", "<answer>The answer is \u2212 3.</answer>", 1.0),
    ("7", "<answer>7 or 8</answer>", 0.0),
    ("8", "<answer>7 or 8</answer>", 0.0),
    ("19", "<answer>It is COVID-19.</answer>", 0.0),
    ("5", "<answer>It is 3-5.</answer>", 0.0),
    ("-5", "<answer>It is 3-5.</answer>", 0.0),
    ("2", "<answer>sqrt(2)</answer>", 0.0),
    ("2", r"<answer>\sqrt{2}\text{ cm}</answer>", 0.0),
    ("7", "<answer>3+4</answer>", 1.0),
    ("4", "<answer>3+4</answer>", 0.0),
    ("3", "the answer is \u20133", 0.0),
    ("-3", "the answer is \u20133", 1.0),
    ("2024", "the years 2020\u20132024", 0.0),
    ("3", "the answer is 1.5 \u00d7 10^3", 0.0),
    ("1500", "the answer is 1.5 \u00d7 10^3", 1.0),
    ("5/6", "the answer is 11 5/6", 0.0),
    ("71/6", "the answer is 11 5/6", 1.0),
    ("0.5", r"the answer is $\frac{1}{2}$", 1.0),
    ("2", r"the answer is $\frac{1}{2}$", 0.0),
]


@pytest.mark.parametrize(("gold", "text", "score"), NUMBERS)
def test_where_a_number_is_asked_for_the_last_one_counts_with_its_sign(
    gold: str, text: str, score: float
):
    assert math_equal(request(text, gold, answer_type="number")) == score


@pytest.mark.parametrize("text", ["<answer>The answer is 73.</answer>", "so 73", "it is **73**"])
def test_where_none_is_asked_for_an_answer_in_words_stays_one(text: str):
    assert math_equal(request(text, "73")) == 0.0


@pytest.mark.parametrize("payload", [{}, {"answers": []}, {"answers": [1]}, {"answers": "1"}])
def test_a_task_without_answers_is_an_error(payload: dict[str, Any]):
    with pytest.raises(ValueError, match=r"payload has answers = "):
        math_equal(ScoreRequest(payload=payload, turns=[ScoreTurn(text=r"\boxed{1}")]))


def test_an_answer_without_end_is_not_compared():
    assert math_equal(request(r"\boxed{" + "1+" * 5000 + "1}", "5001")) == 0.0


# -- real answers ----------------------------------------------------------------------------------


def test_every_gold_answer_of_math500_and_gsm8k_equals_itself(real_data_dir: Path):
    answers: list[str] = []
    for name in ("gsm8k_test", "gsm8k_train", "math500"):
        with gzip.open(real_data_dir / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            records = [json.loads(line) for line in file]
        answers += [record["answer"].rpartition("####")[2].strip() for record in records]
    assert len(answers) == 660 + 7473 + 251
    assert all(answers)
    for answer in answers:
        assert math_answer(read_turn(rf"It is \boxed{{{answer}}}.")) == answer
    # As mathematics too, where the same text alone would do; 5 s for all, so in this process.
    assert [answer for answer in sorted(set(answers)) if not same_mathematics(answer, answer)] == []
