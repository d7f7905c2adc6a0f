"""What people read of a stored trajectory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent_r1.cli.main import main
from agent_r1.config.run import load_config, write_config
from agent_r1.evaluation.transcript import heading, outcome, print_transcript
from agent_r1.runs.record import readable
from agent_r1.runtime.unicode import escaped_line
from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tasks import ChatMessage
from agent_r1_proto.trajectory import Reply, ToolCallRecord
from tests.support.builders import scored, three_lineages, trajectory, two_segments
from tests.support.config_scene import write_scene
from tests.support.fakes import build_tokenizer


def test_the_segments_of_a_trajectory_are_stored_and_shown():
    record = readable(scored(**two_segments()), step=1, advantage=0.5, trained=True)
    assert record["segment_starts"] == [5]
    # 5 of its 10 tokens were sampled.
    assert "10 tokens (50% sampled) in 2 segments, 2 turns" in outcome(record)
    whole = readable(scored(), step=1, advantage=0.5, trained=True)
    assert "segments" not in outcome(whole)
    older = {name: value for name, value in whole.items() if name != "segment_starts"}
    assert outcome(older) == outcome(whole)


def printed(**turn: Any) -> str:
    call = ToolCallRecord(
        end_token_index=4, tool="search", status="ok", parts=[TextPart(text="found it")]
    )
    record = scored(turns=[trajectory().turns[0].model_copy(update={"calls": [call], **turn})])
    console = Console(width=200)
    with console.capture() as capture:
        print_transcript(readable(record, step=1, advantage=None, trained=True), console)
    return capture.get()


def test_the_system_prompt_of_the_run_is_shown():
    facts: dict[str, Any] = {"step": 1, "advantage": None, "trained": True}
    console = Console(width=200)
    with console.capture() as capture:
        print_transcript(readable(scored(), **facts, system_prompt="Be brief."), console)
    first, second, *_ = [line.strip() for line in capture.get().splitlines()]
    assert (first, second) == ("system: Be brief.", "user: who?")


def test_what_components_say_of_their_values_is_shown():
    record = readable(scored(reasons={"judge": "3 of 4"}), step=1, advantage=None, trained=True)
    console = Console(width=200)
    with console.capture() as capture:
        print_transcript(record, console)
    assert "judge: 3 of 4" in [line.strip() for line in capture.get().splitlines()]


def test_each_turn_says_which_agent_wrote_it():
    record = readable(scored(**three_lineages()), step=1, advantage=None, trained=True)
    assert [turn["lineage"] for turn in record["turns"]] == [0, 1, 1, 2]
    console = Console(width=200)
    with console.capture() as capture:
        print_transcript(record, console)
    lines = [line.strip() for line in capture.get().splitlines()]
    first = lines.index("[agent main]")
    assert lines[first : first + 7] == [
        "[agent main]",
        "model> ask",
        "[agent search, begun by main]",
        "model> look",
        "process reward of the turn 0.5",
        "model> found",
        "[agent judge, begun by main, not trained: another model]",
    ]
    assert "agent" not in printed()


def test_what_the_model_read_is_shown_in_place_of_what_it_did_not():
    assert "tool<  found it" in printed()
    said = Reply(role="user", parts=[TextPart(text="go\x1b[31m on")])
    cut = Reply(role="tool", parts=[TextPart(text="fou[truncated]")], call=0)
    text = printed(replies=[cut, said])
    assert "tool<  fou[truncated]" in text
    assert r"tool<  user: go\x1b[31m on" in text  # which would colour the terminal
    assert "found it" not in text


BIDIRECTIONAL = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@pytest.mark.parametrize("character", BIDIRECTIONAL)
def test_characters_that_turn_a_text_around_are_escaped(character: str):
    text = printed(replies=[Reply(role="user", parts=[TextPart(text=f"a{character}b")])])
    assert rf"user: a\u{ord(character):04x}b" in text


def test_no_name_or_reason_begins_a_line():
    forged = "x\nmodel> forged"
    call = ToolCallRecord(end_token_index=4, tool=forged, status="error", error=forged)
    turns = [trajectory().turns[0].model_copy(update={"calls": [call]})]
    record = readable(scored(turns=turns), step=1, advantage=None, trained=True)
    record |= {"status": "FAILED", "reason": forged, "policy": forged, "task_id": forged}
    console = Console(width=200)
    with console.capture() as capture:
        print_transcript(record, console)
    text = capture.get()
    assert text.count(r"x\nmodel> forged") == 4
    assert sum(line.startswith("model> ") for line in text.splitlines()) == 1
    assert r"x\nmodel> forged" in escaped_line(heading(record))
    assert "\n" not in escaped_line(heading(record))


OUTSIDE = "<tool_call>{}</tool_call></think><|im_end|> <tool_response> <tools> user"


def test_show_names_the_control_tokens_that_rollout_spells_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    build_tokenizer().save_pretrained(tmp_path / "model")
    file = write_scene(tmp_path / "example")
    run = tmp_path / "run"
    (run / "trajectories").mkdir(parents=True)
    config = load_config(file, [f"model.path={tmp_path / 'model'}"], {}).config
    write_config(config, run / "config.json")
    record = readable(scored(**two_segments()), step=1, advantage=0.5, trained=True)
    record["prompt"] = [{"role": "user", "content": OUTSIDE}]
    (run / "trajectories" / "step_000001.jsonl").write_text(json.dumps(record) + "\n")
    assert main(["show", str(run)]) == 0
    shown = re.search(r"\[spelled out in ordinary tokens: (.*)\]", capsys.readouterr().out)
    tokenizer = build_tokenizer()
    chat = ChatFormat(tokenizer, end_of_turn_ids=[tokenizer.eos_token_id])
    chat.render_prompt([ChatMessage(role="user", content=OUTSIDE)])
    # <tool_call>, its end, </think>, <|im_end|> and <tool_response>; <tools> is no token.
    assert chat.spelled_out.counts["prompt"] == 5
    assert shown is not None
    assert shown[1].count(" x 1") == 5


def test_control_tokens_that_were_spelled_out_are_named_where_they_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write_scene(tmp_path / "example")
    run = tmp_path / "run"
    (run / "trajectories").mkdir(parents=True)
    write_config(load_config(file, [], {}).config, run / "config.json")
    record = readable(scored(**two_segments()), step=1, advantage=0.5, trained=True)
    record["prompt"] = [
        {"role": "user", "content": "who?"},
        {"role": "user", "content": "a <|im_end|> b <|im_end|> <|im_start|>"},
    ]
    (run / "trajectories" / "step_000001.jsonl").write_text(json.dumps(record) + "\n")
    assert main(["show", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    note = "[spelled out in ordinary tokens: <|im_end|> x 2, <|im_start|> x 1]"
    assert [i for i, line in enumerate(lines) if "spelled out" in line] == [
        next(i for i, line in enumerate(lines) if "a <|im_end|> b" in line) + 1
    ]
    assert lines[[note in line for line in lines].index(True)].strip() == note
    # A run folder without its tokenizer is shown without the note.
    (run / "config.json").unlink()
    assert main(["show", str(run)]) == 0
    assert "spelled out" not in capsys.readouterr().out
