"""What is trained of a session: its lineages, what counts, and the rewards' last turn."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from agent_r1.gateway.attempts import _outcome
from agent_r1.gateway.journal import AttemptEnded
from agent_r1.gateway.metrics import GatewayMetrics
from agent_r1.gateway.session import SessionRules
from agent_r1.gateway.trajectory import Credit, last_main_turn
from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.agents import AgentEnd, AgentExit
from agent_r1_proto.tasks import ChatMessage
from agent_r1_proto.tools import ToolSpec
from tests.support.fakes import (
    FORGETFUL_TEMPLATE,
    build_tokenizer,
    call_text,
)
from tests.unit.gateway.scripted import (
    SEARCH,
    TOOL,
    captured,
    open_client,
    result,
    system,
    user,
)
from tests.unit.rollout.loops import ANSWER


async def test_agents_that_share_a_first_message_are_lineages_and_a_summary_is_a_segment(
    chat: ChatFormat, end_id: int
):
    client = await open_client(chat, end_id, "one", "sub", "two", "three")
    place = user("cwd: /work")  # which Codex tells every agent first
    told = await client.ask(place, user("mend it"))
    await client.ask(place, user("check it"))
    await client.ask(place, user("mend it"), told.message, user("go on"))
    await client.ask(place, user("mend it"), user("Summary: mended half"))
    assert [turn.lineage for turn in client.session.forest.turns] == [0, 1, 0, 0]
    trajectory = client.trajectory()
    captured(client, trajectory)
    assert [x.name for x in trajectory.lineages] == ["main", "agent-1"]
    heir = await client.successor()
    await heir.ask(place, user("check it"), user("again"))
    assert heir.session.forest.turns[-1].lineage == 1


async def test_another_first_message_is_a_lineage_with_an_outcome_of_its_own(
    chat: ChatFormat, end_id: int
):
    client = await open_client(chat, end_id, SEARCH, "a title", ANSWER)
    told = await client.ask(user("who?"), tools=(TOOL,))
    await client.ask(user("Name this dialogue."))
    await client.ask(user("who?"), told.message, result(told.message, "p"), tools=(TOOL,))
    trajectory = client.trajectory()
    captured(client, trajectory)
    assert [(x.name, x.parent, x.excluded) for x in trajectory.lineages] == [
        ("main", None, ""),
        ("agent-1", 0, ""),
    ]
    assert [turn.text for turn in trajectory.turns] == [SEARCH, ANSWER, "a title"]
    assert trajectory.trained_mask().sum() == trajectory.num_action_tokens
    only_main = client.trajectory(credit=Credit("main"))
    assert only_main.lineages[1].excluded == "side_call"


async def test_of_answers_that_nobody_goes_on_with_the_last_counts(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "one", "two", "three")
    told = await client.ask(user("who?"), n=3)
    assert sorted(told.texts.values()) == ["one", "three", "two"]
    trajectory = client.trajectory()
    captured(client, trajectory)
    assert len(trajectory.trained_turns()) == 1
    assert len({request.seed for request in client.servers.requests}) == 3


async def test_the_last_turn_in_time_is_the_last_of_the_trajectory(chat: ChatFormat, end_id: int):
    first = call_text(query="x")
    client = await open_client(chat, end_id, first, "<answer>Bob</answer>", "<answer>Ada</answer>")
    told = await client.ask(system("A"), user("who?"), tools=(TOOL,))
    await client.ask(system("write a title"), user("who?"))
    history = (system("A"), user("who?"), told.message, result(told.message, "p"))
    await client.ask(*history, tools=(TOOL,))
    trajectory = client.trajectory()
    captured(client, trajectory)
    assert trajectory.turns[-1].answer == "Ada"


async def test_going_back_and_returning_ends_with_what_came_last(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "a", "b", "c", "d")
    a = await client.ask(user("1"))
    b = await client.ask(user("1"), a.message, user("2"))
    await client.ask(user("1"), a.message, user("other"))
    await client.ask(user("1"), a.message, user("2"), b.message, user("3"))
    trajectory = client.trajectory()
    captured(client, trajectory)
    main = [turn.text for turn in trajectory.trained_turns()]
    assert main[-1] == "d"


async def test_a_summary_that_is_gone_on_with_keeps_its_lineage(chat: ChatFormat, end_id: int):
    summary = "It was asked who; Ada is likely."
    client = await open_client(chat, end_id, "a", "b", summary, "title", "<answer>Ada</answer>")
    history = [user("who?")]
    for _ in range(2):
        history += [(await client.ask(*history)).message, user("on")]
    await client.ask(*history)
    await client.ask(user("name this"))  # a side call
    await client.ask(user(f"So far: {summary}"))
    trajectory = client.trajectory(credit=Credit("main"))
    captured(client, trajectory)
    assert [turn.text for turn in trajectory.trained_turns()][-1] == "<answer>Ada</answer>"
    assert {one.excluded for one in trajectory.lineages} == {"", "side_call"}


@pytest.mark.parametrize(
    "quoted", ["by the user", "as an answer", "without tags", "indented", "as JSON"]
)
async def test_a_summary_of_a_side_call_is_gone_on_with_by_the_agent(
    chat: ChatFormat, end_id: int, quoted: str
):
    words = 'Summary: Ada was looked for,\nand "nothing" is known yet.'
    summary = words if quoted == "as an answer" else f"<summary>\n{words}\n</summary>"
    client = await open_client(chat, end_id, SEARCH, SEARCH, summary, SEARCH, ANSWER)
    rules = "You are an agent.\nYou look things up.\nCalls so far: "
    history = [system(f"{rules}0"), user("who?")]
    for _ in range(2):
        told = (await client.ask(*history, tools=(TOOL,))).message
        history += [told, result(told, "p")]
    await client.ask(system("Summarize."), user("The dialogue: who? p p"))
    said = ChatMessage(role="assistant", content=summary)
    quote = [user("What was done?"), said, user("Go on.")]
    if quoted != "as an answer":
        forms = {
            "by the user": summary,
            "without tags": words,
            "indented": words.replace("\n", "\n    "),
            "as JSON": json.dumps(words),
        }
        quote = [user(f"What was done: {forms[quoted]}")]
    history = [system(f"{rules}2"), *quote]
    told = (await client.ask(*history, tools=(TOOL,))).message
    await client.ask(*history, told, result(told, "p"), tools=(TOOL,))
    heir = await client.successor()
    for one in (client, heir):
        trajectory = one.trajectory(credit=Credit("main"))
        captured(one, trajectory)
        assert [turn.text for turn in trajectory.trained_turns()] == [SEARCH] * 3 + [ANSWER]
        assert [lineage.excluded for lineage in trajectory.lineages] == ["", "side_call"]


ANSWERS = "You answer.\nBe short.\nIn English.\n"


@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
@pytest.mark.parametrize(
    ("told", "checks"),
    [
        ("You answer.", "Check the answer."),
        (ANSWERS, ANSWERS.replace("You answer", "You check answers")),
        ("You help.", None),
        (None, None),
    ],
    ids=["others", "alike", "none later", "none"],
)
async def test_who_checks_an_answer_is_another_lineage(
    chat: ChatFormat,
    end_id: int,
    tools: tuple[ToolSpec, ...],
    told: str | None,
    checks: str | None,
):
    final = "The capital is Paris, as everybody knows."
    client = await open_client(chat, end_id, final, '{"ok": true}')
    told_, checks_ = ([] if one is None else [system(one)] for one in (told, checks))
    await client.ask(*told_, user("Which capital?"), tools=tools)
    await client.ask(*checks_, user(f"Check: {final}"))
    trajectory = client.trajectory(credit=Credit("main"))
    assert [turn.text for turn in trajectory.trained_turns()] == [final]
    last = last_main_turn(client.session, Credit("main"))
    assert last is not None
    assert last.number == 0


async def test_a_pipeline_of_roles_is_not_one_agent(chat: ChatFormat, end_id: int):
    found = "Paris is the capital of France since 987."
    client = await open_client(chat, end_id, SEARCH, found, SEARCH, "The finished text.")
    for role, question in (("researcher", "find it"), ("writer", f"Write with: {found}")):
        rules = system(f"You are the {role}.\nThink step by step.\nCall tools.\nEnd with a report.")
        told = (await client.ask(rules, user(question), tools=(TOOL,))).message
        await client.ask(rules, user(question), told, result(told, "p"), tools=(TOOL,))
    assert len(client.trajectory().lineages) == 2


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("guarded", [False, True])
async def test_an_agent_that_sums_up_is_known_by_its_tools_and_by_instructions_but_for_numbers(
    chat: ChatFormat, end_id: int, n: int, guarded: bool
):
    summary = "Summary: Ada was looked for twice, nothing yet."
    others = ["Summary: nothing was found by anybody."] * (n - 1)
    script = ["fine"] * guarded + [SEARCH, summary, *others, SEARCH, ANSWER]
    client = await open_client(chat, end_id, *script)
    if guarded:
        await client.ask(system("Harmful?"), user("who?"))
    history = [system("You look things up. It is 12:01."), user("who?")]
    told = (await client.ask(*history, tools=(TOOL,))).message
    await client.ask(*history, told, result(told, "p"), user("Sum up."), tools=(TOOL,), n=n)
    history = [system("You look things up. It is 12:02."), user(f"So far: {summary}")]
    told = (await client.ask(*history, tools=(TOOL,))).message
    await client.ask(*history, told, result(told, "p"), tools=(TOOL,))
    client.trajectory()
    assert {turn.lineage for turn in client.session.forest.turns} == {0}


async def test_the_agent_is_who_began_however_much_others_work_for_it(
    chat: ChatFormat, end_id: int
):
    final = "<answer>Paris</answer>"
    client = await open_client(chat, end_id, "A title", SEARCH, SEARCH, "on", "Rome", final)
    await client.ask(user("Name this: who?"))
    boss = [system("You delegate."), user("who?")]
    told = (await client.ask(*boss, tools=(TOOL,))).message
    work = [system("You look things up."), user("look")]
    first = (await client.ask(*work, tools=(TOOL,))).message
    work += [first, result(first, "p")]
    second = (await client.ask(*work, tools=(TOOL,))).message
    await client.ask(*work, second, user("go on"), tools=(TOOL,))
    await client.ask(*boss, told, result(told, "Rome"), tools=(TOOL,))
    trajectory = client.trajectory(credit=Credit("main"))
    captured(client, trajectory)
    assert [turn.text for turn in trajectory.trained_turns()] == [SEARCH, final]
    last = last_main_turn(client.session, Credit())
    assert last is not None
    assert last.number == 5


async def test_an_agent_that_sends_the_end_of_its_history_stays_one(chat: ChatFormat, end_id: int):
    script = [f"Step {i} is done, and all is well." for i in range(4)]
    client = await open_client(chat, end_id, *script, "<answer>Ada</answer>")
    history = [user("who?")]
    for i in range(5):
        told = (await client.ask(system("You answer."), *history[-3:])).message
        history += [told, user(f"go on {i}")]
    trajectory = client.trajectory(credit=Credit("main"))
    captured(client, trajectory)
    assert [turn.text for turn in trajectory.trained_turns()] == [*script, "<answer>Ada</answer>"]
    assert trajectory.lineages == []


async def test_an_empty_answer_of_the_clients_own_is_not_one_that_it_never_had(
    chat: ChatFormat, end_id: int
):
    client = await open_client(chat, end_id, "<think>so long</think>", "end")
    await client.ask(user("who?"), deliver=False)
    empty = ChatMessage(role="assistant", content="")
    await client.ask(user("who?"), empty, user("please answer"))
    trajectory = client.trajectory()
    captured(client, trajectory)
    assert [turn.text for turn in trajectory.trained_turns()] == ["end"]
    assert "so long" not in chat.decode(client.servers.requests[-1].token_ids)


async def test_a_second_summary_is_gone_on_with_too(chat: ChatFormat, end_id: int):
    summaries = [f"Summary {i}: Ada was looked for and not found." for i in ("one", "two")]
    client = await open_client(chat, end_id, SEARCH, summaries[0], SEARCH, summaries[1], ANSWER)
    for summary in ("", *summaries):
        history = [system("You look things up."), user(f"who? {summary}")]
        told = (await client.ask(*history, tools=(TOOL,))).message
        if told.tool_calls:
            await client.ask(*history, told, result(told, "p"), user("Sum up."), tools=(TOOL,))
    client.trajectory()
    assert {turn.lineage for turn in client.session.forest.turns} == {0}


LOOKS_UP = system("You look things up.")


@pytest.mark.parametrize(("length", "lineages"), [(19, {0, 1}), (20, {0})])
async def test_a_text_that_may_be_repeated_by_chance_is_no_summary(
    chat: ChatFormat, end_id: int, length: int, lineages: set[int]
):
    text = "x" * length
    client = await open_client(chat, end_id, text, ANSWER)
    await client.ask(LOOKS_UP, user("who?"), tools=(TOOL,))
    await client.ask(LOOKS_UP, user(f"So far: {text}"), tools=(TOOL,))
    client.trajectory()
    assert {turn.lineage for turn in client.session.forest.turns} == lineages


@pytest.mark.parametrize("at", [0, 1, 2])
async def test_a_side_call_sums_up_only_after_the_agents_last_turn_and_before_the_next(
    chat: ChatFormat, end_id: int, at: int
):
    """As a plan for two workers, a summary, and a title that repeats what was asked."""
    text = "Paris is the capital of France."
    script = [SEARCH, SEARCH]
    script.insert(at, text)
    client = await open_client(chat, end_id, *script)
    asked: list[tuple[tuple[ChatMessage, ...], tuple[ToolSpec, ...]]] = [
        ((LOOKS_UP, user("who?")), (TOOL,)),
        ((LOOKS_UP, user(f"So far: {text}")), (TOOL,)),
    ]
    asked.insert(at, ((user("Say it in a sentence."),), ()))
    for messages, tools in asked:
        await client.ask(*messages, tools=tools)
    assert len(client.trajectory().lineages) == (2 if at == 1 else 3)


async def test_who_works_while_the_agent_goes_on_is_a_lineage_of_its_own(
    chat: ChatFormat, end_id: int
):
    found = "Paris is the capital of France."
    client = await open_client(chat, end_id, SEARCH, "yes", found)
    told = (await client.ask(LOOKS_UP, user("Which?"), tools=(TOOL,))).message
    await client.ask(LOOKS_UP, user(f"Is it so? {found}"), tools=(TOOL,))
    await client.ask(LOOKS_UP, user("Which?"), told, result(told, "yes"), tools=(TOOL,))
    trajectory = client.trajectory(credit=Credit("main"))
    assert [turn.text for turn in trajectory.trained_turns()] == [SEARCH, found]


@pytest.mark.parametrize(
    ("more", "lineages"),
    [("\nCheck it.", {0}), ("\nCheck it.\nCorrect it.", {0, 1})],  # 2 of 3 lines, and of 4
)
async def test_who_has_many_more_instructions_is_another_agent(
    chat: ChatFormat, end_id: int, more: str, lineages: set[int]
):
    rules, found = "You work.\nBe brief.", "Paris is the capital of France."
    client = await open_client(chat, end_id, found, ANSWER)
    await client.ask(system(rules), user("Which?"), tools=(TOOL,))
    await client.ask(system(rules + more), user(f"So far: {found}"), tools=(TOOL,))
    client.trajectory()
    assert {turn.lineage for turn in client.session.forest.turns} == lineages


async def test_instructions_without_a_space_hold_nobody_up(chat: ChatFormat, end_id: int):
    rules = SessionRules(max_context=1 << 20)
    client = await open_client(chat, end_id, SEARCH, ANSWER, rules=rules)
    for question in ("who?", "and who?"):  # in quadratic time this takes minutes
        await client.ask(system("-" * 100_000 + "1"), user(question), tools=(TOOL,))
    assert len(client.trajectory().lineages) == 2


@pytest.mark.parametrize("agents", ["all", "main"])
async def test_side_calls_are_named_by_their_instructions(
    chat: ChatFormat, end_id: int, agents: Literal["all", "main"]
):
    client = await open_client(chat, end_id, "A title", "Another", ANSWER)
    for question in ("who?", "and who?"):
        await client.ask(system("You are a title generator."), user(f"Name: {question}"))
    await client.ask(system("You answer."), user("who?"))
    credit = Credit(agents, ["^You are a title"])
    trajectory = client.trajectory(credit=credit)
    captured(client, trajectory)
    assert [turn.text for turn in trajectory.trained_turns()] == [ANSWER]
    assert {one.excluded for one in trajectory.lineages} == {"", "side_call"}
    last = last_main_turn(client.session, credit)
    assert last is not None
    assert last.number == 2


async def test_a_sub_agent_that_is_given_what_another_found_is_a_lineage_of_its_own(
    chat: ChatFormat, end_id: int
):
    found = "Paris is the capital of France since 987."
    client = await open_client(chat, end_id, SEARCH, "step", found, SEARCH, "draft", "text", ANSWER)
    history = [system("You delegate."), user("who?")]
    for question, text in (("research this", found), (f"write with: {found}", "text")):
        told = (await client.ask(*history, tools=(TOOL,))).message
        step = (await client.ask(user(question))).message
        await client.ask(user(question), step, user("go on"))
        history += [told, result(told, text)]
    await client.ask(*history, tools=(TOOL,))
    trajectory = client.trajectory(credit=Credit("main"))
    captured(client, trajectory)
    assert [turn.text for turn in trajectory.trained_turns()] == [SEARCH, SEARCH, ANSWER]
    names = [one.name for one in trajectory.lineages]
    assert names == ["main", "agent-1:side_call", "agent-2:side_call"]


async def test_a_question_asked_anew_takes_no_credit_from_another(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "rejected", "title", "wanted", "end")
    await client.ask(user("who?"))
    await client.ask(system("a title"), user("who?"))
    told = await client.ask(user("who?"))
    await client.ask(user("who?"), told.message, user("sure?"))
    trajectory = client.trajectory()
    captured(client, trajectory)
    why = {
        turn.text: one.excluded
        for one, (start, end) in zip(trajectory.lineages, trajectory.lineage_bounds(), strict=True)
        for turn in trajectory.turns
        if start <= turn.start < end
    }
    assert why["rejected"] == "branch_not_gone_on_with"
    assert (why["wanted"], why["end"]) == ("", "")


@pytest.mark.parametrize("is_rewritten", [False, True])
async def test_calls_have_the_results_that_the_next_turn_has_read(
    chat: ChatFormat, end_id: int, is_rewritten: bool
):
    client = await open_client(chat, end_id, call_text(query="x"), "cut", "end")
    told = await client.ask(user("who?"), tools=(TOOL,))
    for text, deliver in (("FIRST", False), ("SECOND", True)):
        history = [user("who?"), told.message, result(told.message, text)]
        if deliver and is_rewritten:
            history.insert(0, system("Be brief."))
        await client.ask(*history, tools=(TOOL,), deliver=deliver)
    trajectory = client.trajectory()
    (call,) = [call for turn in trajectory.trained_turns() for call in turn.calls]
    assert call.text() == "SECOND"


async def test_an_answer_that_came_later_and_was_not_heard_takes_no_credit(
    chat: ChatFormat, end_id: int
):
    client = await open_client(chat, end_id, "heard", "lost")
    await client.ask(user("who?"))
    await client.ask(user("who?"), deliver=False)
    assert [turn.text for turn in client.trajectory().trained_turns()] == ["heard"]


async def test_answers_to_a_rewritten_history_come_after_one_turn(chat: ChatFormat, end_id: int):
    script = ["<think>1</think>same", "end", "<think>2</think>same", "other"]
    client = await open_client(chat, end_id, *script)
    for _ in range(2):
        told = await client.ask(user("who?"))
        await client.ask(system("Be brief."), user("who?"), told.message, user("more?"))
    trajectory = client.trajectory()
    captured(client, trajectory)
    assert [turn.text for turn in trajectory.trained_turns()] == [script[0], "other"]


@pytest.mark.parametrize("heard", [0, 1])
async def test_of_equal_answers_that_which_was_heard_has_the_next_turn(
    chat: ChatFormat, end_id: int, heard: int
):
    client = await open_client(chat, end_id, "same", "same", "end")
    told = await client.ask(user("who?"), n=2, deliver=False)
    await client.session.delivered(heard)
    await client.ask(user("who?"), told.message, user("more?"))
    turns = client.session.forest.turns
    assert turns[2].parent is turns[heard]


async def test_a_side_call_of_an_agent_stands_behind_its_own_lineage(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "a", "b", "x", "y", "z")
    told = await client.ask(user("main"))
    await client.ask(user("main"), told.message, user("on"))
    other = await client.ask(user("other"))
    await client.ask(user("other"))  # an answer that is not gone on with
    await client.ask(user("other"), other.message, user("on"))
    lineages = client.trajectory().lineages
    names = [(one.name, one.parent) for one in lineages]
    assert names[0] == ("main", None)
    kept = next(i for i, one in enumerate(lineages) if one.name == "agent-1")
    assert lineages[kept].parent == 0
    (excluded,) = [one for one in lineages if one.excluded]
    assert excluded.parent == kept


async def test_a_template_that_rewrites_has_a_segment_for_each_turn(end_id: int):
    forgetful = ChatFormat(
        build_tokenizer(template=FORGETFUL_TEMPLATE),
        end_of_turn_ids=[end_id],
        reply_roles=("tool", "user"),
        segments=True,
    )
    client = await open_client(forgetful, end_id, SEARCH, ANSWER)
    told = await client.ask(user("who?"), tools=(TOOL,))
    await client.ask(user("who?"), told.message, result(told.message, "p"), tools=(TOOL,))
    trajectory = client.trajectory()
    captured(client, trajectory)
    assert len(trajectory.segment_starts) == 1


async def test_the_agents_answer_and_what_it_left_are_with_the_last_turn(
    chat: ChatFormat, end_id: int
):
    client = await open_client(chat, end_id, "one", "title", "two")
    told = await client.ask(user("who?"))
    await client.ask(user("name it"))
    await client.ask(user("who?"), told.message, user("sure?"))
    trajectory = client.trajectory(answer="42", data={"exit": "ok"})
    last = [turn for turn in trajectory.turns if turn.text == "two"]
    assert [(turn.answer, turn.data) for turn in last] == [("42", {"exit": "ok"})]
    assert [turn.data for turn in trajectory.turns if turn.text != "two"] == [None, None]


async def test_calls_that_cannot_be_read_are_counted(chat: ChatFormat, end_id: int):
    bad = "<tool_call>{search}</tool_call>"
    client = await open_client(chat, end_id, bad + SEARCH, "Ada")
    told = await client.ask(user("who?"), tools=(TOOL,))
    await client.ask(user("who?"), told.message, result(told.message, "Ada."), tools=(TOOL,))
    metrics = GatewayMetrics(client.servers, in_flight=lambda: 0, max_concurrent=1)  # type: ignore[arg-type]
    metrics.note_end(client.session, client.trajectory())
    text = metrics.page.text().decode()
    assert "agent_r1_gateway_malformed_calls_total 1.0" in text
    assert 'agent_r1_gateway_attempts_total{status="COMPLETED"} 1.0' in text


@pytest.mark.parametrize(
    ("end", "noted", "status", "reason"),
    [
        ({"exit": "ok"}, {}, "COMPLETED", "answer"),
        ({"exit": "ok"}, {"has_moved": True}, "COMPLETED", "answer"),
        ({"exit": "failed", "error": "x"}, {}, "TRUNCATED", "agent_failed: x"),
        (
            {"exit": "failed", "error": "x"},
            {"has_moved": True},
            "FAILED",
            "agent_lost: its session",
        ),
        ({"exit": "failed"}, {"fault": "policy_error: y"}, "FAILED", "policy_error: y"),
        ({"exit": "ok"}, {"spent": "max_requests"}, "TRUNCATED", "max_requests"),
        ({"exit": "timeout"}, {}, "TRUNCATED", "agent_timeout"),
        ({"exit": "lost", "error": "x"}, {}, "FAILED", "agent_lost: x"),
    ],
)
async def test_how_an_attempt_ends(
    chat: ChatFormat,
    end_id: int,
    end: dict[str, Any],
    noted: dict[str, Any],
    status: str,
    reason: str,
):
    client = await open_client(chat, end_id, "one")
    await client.ask(user("who?"))
    for name, value in noted.items():
        setattr(client.session, name, value)
    found = _outcome(client.session, AttemptEnded(end=AgentEnd(**end)))
    assert found[0] == status
    assert found[1].startswith(reason)


@pytest.mark.parametrize(
    ("exit_", "reason"),
    [("not_started", "agent_not_started: x"), ("failed", "agent_silent: "), ("ok", "agent_silent")],
)
async def test_an_attempt_without_a_turn_is_no_fault_of_the_policy(
    chat: ChatFormat, end_id: int, exit_: AgentExit, reason: str
):
    client = await open_client(chat, end_id, "one")
    over = AttemptEnded(end=AgentEnd(exit=exit_, error="x"))
    status, why = _outcome(client.session, over)
    assert (status, why[: len(reason)]) == ("FAILED", reason)
    await client.ask(user("who?"))
    expected = "COMPLETED" if exit_ == "ok" else "TRUNCATED"
    assert _outcome(client.session, over)[0] == expected
