"""Demonstrations for the base model: runs of the oracle that lack its care in places.

Each ability fails by chance, and how often depends on what the run is about (the relation, the
tool, the hop, the number of a namesake). Where a mistake is the more frequent choice, the base
model's greedy answer makes it; where it is the rarer one, sampling finds the right way. Because
there are many such places, no single change repairs the model.
"""

import random
from collections.abc import Callable, Mapping

from questions import Question
from scripted import NOTHING, UNAVAILABLE, Oracle, think
from world import CHAIN_B, NUMBERS, YEARS, entry_text

from agent_r1.text.reading import parse_turn
from agent_r1_proto.tasks import Task

Message = dict[str, str]
LookUp = Callable[[str, str], str]
"""(tool, argument) -> what the tool answers."""

UNAVAILABLE_SHARE = 0.15
OFTEN, SELDOM = 0.62, 0.05
"""How often a mistake is made: in the places named below, and elsewhere."""
CARELESS_RELATIONS = ("mother", "sister", "uncle", "town", "doctor")
"""An entry about a namesake is accepted here."""
LAST_RELATIONS = ("father", "town", "trade")
"""Chains are given up before these."""


class Careless(Oracle):
    """The oracle with mistakes.

    Args:
        task: the question.
        rng: decides where mistakes are made.
    """

    def __init__(self, task: Task, rng: random.Random) -> None:
        super().__init__(task)
        self._rng = rng

    def _fails(self, often: bool) -> bool:
        return self._rng.random() < (OFTEN if often else SELDOM)

    def gives_up(self, tool: str) -> bool:
        """Mostly where an entry cannot be read, or searched for: that depends on the relation."""
        return self._fails((tool == "read") == (self.relation not in CHAIN_B))

    def overlooks_alias(self) -> bool:
        """Mostly at the second hop."""
        return self._fails(self.hop == 1)

    def accepts(self, number: str, wanted: str) -> bool:
        """Mostly careful, but for some relations."""
        return number == wanted or self._fails(self.relation in CARELESS_RELATIONS)

    def stops_early(self) -> bool:
        """Mostly before some relations."""
        if self.order:
            return self._rng.random() < 0.3
        return self._fails(self.relation in LAST_RELATIONS)

    def reads_again(self) -> bool:
        """Mostly for the third of the namesakes, at the first hop."""
        return self._fails(self.hop == 0 and self._person.endswith(f" {NUMBERS[-1]}"))

    def guesses(self) -> bool:
        """In every second run."""
        return self._rng.random() < 0.5


def play(
    agent: Oracle, look_up: LookUp, rng: random.Random | None = None, max_calls: int = 40
) -> tuple[list[str], int]:
    """Let an agent run.

    Args:
        agent: takes the turns.
        look_up: answers calls.
        rng: draws the calls that are answered "unavailable"; None answers all.
        max_calls: after so many the run ends without an answer.

    Returns:
        The texts of the agent's turns and of what it was answered, in turn, and the number of calls
        that count.
    """
    texts: list[str] = [agent.turn([])]
    counted = 0
    while calls := parse_turn(texts[-1]).calls:
        if counted == max_calls:
            break
        (value,) = calls[0].arguments.values()
        if rng is not None and rng.random() < UNAVAILABLE_SHARE:
            reply = UNAVAILABLE
        else:
            reply = look_up(calls[0].name, str(value))
            counted += 1
        texts += [reply, agent.turn([reply])]
    return texts, counted


def demonstrate(prompt: str, agent: Oracle, look_up: LookUp, rng: random.Random) -> list[Message]:
    """Return the chat messages of one run."""
    texts, _ = play(agent, look_up, rng)
    roles = ["assistant", "tool"] * len(texts)
    said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [{"role": "user", "content": prompt}, *said]


def recital(chain: Question) -> list[Message]:
    """The first thought of a run, which lists the relations, without a run."""
    return [
        {"role": "user", "content": chain.text},
        {"role": "assistant", "content": think(" ".join(chain.relations))},
    ]


def comparison_drill(question: Question, born: Mapping[str, str]) -> list[Message]:
    """A comparison of two years that stand in the question: answered without a call."""
    pairs = [(born[start], start) for start in question.starts]
    entries = "".join(entry_text("born", start, year) for year, start in pairs)
    year = next(year for year, start in pairs if start == question.answer)
    note = f" {question.order} {year} {question.answer}."
    return [
        {"role": "user", "content": f" Who was born {question.order}?{entries}"},
        {
            "role": "assistant",
            "content": f"<think>{note}</think><answer> {question.answer}</answer>",
        },
    ]


SPOKEN_WORDS = " ".join(["none yes no again done", UNAVAILABLE, NOTHING, *YEARS, "born of see"])
"""Words of notes and tool answers, for the tokenizer's vocabulary."""
