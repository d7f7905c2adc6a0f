"""The tokenizer, chat template and committed base model of examples/tiny_world."""

import json
import random
import tomllib
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

MAX_BASE_BYTES = 3_000_000
BASE = Path(__file__).resolve().parents[3] / "examples" / "tiny_world" / "base"

DIALOGUE = [
    {"role": "user", "content": "Where was the author of Silent Dream born?"},
    {"role": "assistant", "content": "<think> plan</think><tool_call>{}</tool_call>"},
    {"role": "tool", "content": " Silent Dream was written by Harim Abak."},
    {"role": "assistant", "content": "<think> next</think><tool_call>{}</tool_call>"},
    {"role": "tool", "content": "first"},
    {"role": "tool", "content": "second"},
    {"role": "assistant", "content": "<answer> Ashmere Bay</answer>"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BASE)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


LOADED = AutoTokenizer.from_pretrained(BASE)


@given(
    st.text() | st.lists(st.sampled_from([*LOADED.get_added_vocab(), " ", "\n", "a"])).map("".join)
)
def test_any_text_survives_encoding_up_to_normal_form(text: str):
    # Form NFC as in Qwen2.5's tokenizer; st.text leaves out surrogates, which have no UTF-8 form.
    decoded = LOADED.decode(ids_of(LOADED, text), skip_special_tokens=False)
    assert decoded == unicodedata.normalize("NFC", text)


def test_the_vocabulary_has_no_unused_ids(tokenizer: Any):
    config = json.loads((BASE / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_the_committed_tokenizer_is_the_one_the_code_builds(
    tiny_world: SimpleNamespace, tokenizer: Any
):
    built = tiny_world.tokenizer.build_tokenizer()
    assert built.get_vocab() == tokenizer.get_vocab()
    assert built.chat_template == tokenizer.chat_template


def test_an_entity_has_the_same_ids_wherever_it_stands(tokenizer: Any):
    name = ids_of(tokenizer, " Harim Abak")
    assert len(name) == 2
    for text in (
        "Who was born earlier, Harim Abak or Kalok Abak?",
        '<tool_call>{"name":"search","arguments":{"query":" Harim Abak born"}}</tool_call>',
        "<tool_response>\n Harim Abak was born in 1830.\n</tool_response>",
        "<answer> Harim Abak</answer>",
    ):
        ids = ids_of(tokenizer, text)
        assert any(ids[i : i + 2] == name for i in range(len(ids)))


def test_every_word_of_a_world_is_one_token(tiny_world: SimpleNamespace, tokenizer: Any):
    world = tiny_world.world.make_world(9)
    makers = [maker for shares in tiny_world.questions.SETS.values() for maker in shares]
    asked = tiny_world.questions.make_questions(
        world, "test", dict.fromkeys(makers, 1.0), 30, random.Random(0)
    )
    texts = [e.text for e in world.entities.values()] + [q.text for q in asked]
    for text in texts:
        words = text.replace("-", " ").split()
        marks = sum(text.count(mark) for mark in ",.?-")
        # "father-in-law" is the one spelling without a space before a word.
        extra = sum(len(part) - 1 for word in text.split() for part in word.split("-")[1:])
        assert len(ids_of(tokenizer, f" {text}")) <= len(words) + marks + extra


def test_the_scaffolding_of_a_call_is_two_tokens(tiny_world: SimpleNamespace, tokenizer: Any):
    text = tiny_world.questions.call_text(" Harim Abak born")
    ids = ids_of(tokenizer, text)
    assert len(ids) == 7  # <tool_call>, opening, three words, closing, </tool_call>
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert json.loads(decoded.removeprefix("<tool_call>").removesuffix("</tool_call>")) == {
        "name": "search",
        "arguments": {"query": " Harim Abak born"},
    }


# Two results of one turn share one user turn, so a dialogue is never cut between them.
CUTS = [
    length
    for length in range(1, len(DIALOGUE))
    if not DIALOGUE[length - 1]["role"] == DIALOGUE[length]["role"] == "tool"
]


@pytest.mark.parametrize("length", CUTS)
def test_a_longer_dialogue_extends_the_rendering_of_a_shorter_one(tokenizer: Any, length: int):
    shorter = DIALOGUE[:length]
    whole = tokenizer.apply_chat_template(DIALOGUE, tokenize=False)
    generation = DIALOGUE[length]["role"] == "assistant"
    rendered = tokenizer.apply_chat_template(
        shorter, tokenize=False, add_generation_prompt=generation
    )
    assert whole.startswith(rendered)


def test_tool_results_are_user_turns_as_in_qwen(tokenizer: Any):
    text = tokenizer.apply_chat_template(
        DIALOGUE[:3], tokenize=False, add_generation_prompt=True, tools=[{"type": "function"}]
    )
    assert text == (
        "<|im_start|>user\nWhere was the author of Silent Dream born?<|im_end|>\n"
        "<|im_start|>assistant\n<think> plan</think><tool_call>{}</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n Silent Dream was written by Harim Abak.\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_committed_base_is_small_and_stock_qwen2():
    files = [path for path in BASE.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BASE_BYTES
    config = json.loads((BASE / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["tie_word_embeddings"] is False
    assert config["max_position_embeddings"] == 4096
    generation = json.loads((BASE / "generation_config.json").read_text())
    assert generation["eos_token_id"] == LOADED.convert_tokens_to_ids("<|im_end|>")


def test_the_kv_cache_of_the_run_holds_every_trajectory_at_its_longest():
    config = tomllib.loads((BASE.parent / "run.toml").read_text(encoding="utf-8"))
    # A key and a value of 4 bytes, in 3 layers of 128 values: 3,072 bytes a token.
    tokens = config["rollout"]["max_concurrent"] * config["model"]["max_context"]
    assert config["rollout"]["kv_cache_gib"] * 2**30 >= tokens * 3072
