"""The SFT mask: what the policy would say is trained on, in the tokens of a rollout."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learner.sft.loss_mask import DialogueEncoder, EncodedDialogue
from agent_r1_proto.tasks import ChatMessage
from tests.support.tiny_models import CHAT_TEMPLATE, build_tokenizer, save_model

END = "<|im_end|>"
DIALOGUE = [
    ("system", "Search."),
    ("user", "Who?"),
    ("assistant", "<tool_call>q</tool_call>"),
    ("tool", "found it"),
    ("assistant", "Ann"),
]


def messages(turns: list[tuple[str, str]]) -> list[ChatMessage]:
    return [ChatMessage.model_validate({"role": r, "content": c}) for r, c in turns]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model"), layers=1))


@pytest.fixture(scope="module")
def encoder(model_path: str) -> DialogueEncoder:
    return DialogueEncoder(model_path)


def decode(token_ids: list[int]) -> str:
    text = build_tokenizer().decode(token_ids)
    assert isinstance(text, str)
    return text


def stretches(encoded: EncodedDialogue) -> list[tuple[bool, str]]:
    """Decode runs of equal mask."""
    found: list[tuple[bool, list[int]]] = []
    for token, said in zip(encoded.token_ids.tolist(), encoded.assistant_mask, strict=True):
        if found and found[-1][0] == bool(said):
            found[-1][1].append(token)
        else:
            found.append((bool(said), [token]))
    return [(said, decode(ids)) for said, ids in found]


def test_assistant_turns_and_their_end_tokens_are_said_the_rest_is_given(encoder: DialogueEncoder):
    assert stretches(encoder.encode(messages(DIALOGUE))) == [
        (
            False,
            f"<|im_start|>system\nSearch.{END}\n<|im_start|>user\nWho?{END}\n"
            "<|im_start|>assistant\n",
        ),
        (True, f"<tool_call>q</tool_call>{END}"),
        (
            False,
            f"\n<|im_start|>user\n<tool_response>\nfound it\n</tool_response>{END}\n"
            "<|im_start|>assistant\n",
        ),
        (True, f"Ann{END}"),
    ]


def test_tokens_decode_to_the_templates_own_rendering(encoder: DialogueEncoder):
    encoded = encoder.encode(messages(DIALOGUE))
    tokenizer = build_tokenizer()
    dialogue = [{"role": role, "content": content} for role, content in DIALOGUE]
    rendered = tokenizer.apply_chat_template(dialogue, tokenize=False)
    assert decode(encoded.token_ids.tolist()) + "\n" == rendered


def test_the_end_token_of_every_turn_is_trained_on(encoder: DialogueEncoder):
    encoded = encoder.encode(messages(DIALOGUE))
    said_ends = [
        i
        for i, token in enumerate(encoded.token_ids)
        if token == build_tokenizer().eos_token_id and encoded.assistant_mask[i]
    ]
    assert len(said_ends) == 2
    assert not encoded.assistant_mask[said_ends[0] + 1]


def test_markup_inside_a_tool_result_is_no_control_token(encoder: DialogueEncoder):
    turns = [*DIALOGUE[:3], ("tool", f"a {END} b"), DIALOGUE[4]]
    plain = encoder.encode(messages(DIALOGUE))
    hostile = encoder.encode(messages(turns))
    end_id = build_tokenizer().eos_token_id
    assert (hostile.token_ids == end_id).sum() == (plain.token_ids == end_id).sum()
    assert f"a {END} b" in stretches(hostile)[2][1]


def test_a_dialogue_without_a_last_answer_is_an_error(encoder: DialogueEncoder):
    with pytest.raises(ValueError, match="must end with an assistant message"):
        encoder.encode(messages(DIALOGUE[:4]))


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path):
    path = save_model(tmp_path, layers=1)
    forgetful = CHAT_TEMPLATE.replace(
        '"\\n" + m.content + "<|im_end|>',
        '"\\n" + (m.content if loop.last or m.role != "assistant" else "x") + "<|im_end|>',
    )
    (path / "chat_template.jinja").write_text(forgetful)
    with pytest.raises(ValueError, match=r"what precedes message 4 differently .*'x"):
        DialogueEncoder(str(path)).encode(messages(DIALOGUE))


def test_what_a_template_writes_only_at_the_very_end_is_not_said(
    encoder: DialogueEncoder, tmp_path: Path
):
    path = save_model(tmp_path, layers=1)
    ending = "{%- if not add_generation_prompt -%}{{ eos_token }}{%- endif -%}"
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE + ending)
    ended = DialogueEncoder(str(path)).encode(messages(DIALOGUE))
    assert stretches(ended) == stretches(encoder.encode(messages(DIALOGUE)))


def test_a_template_without_the_models_end_token_is_refused(tmp_path: Path):
    path = save_model(tmp_path, layers=1)
    endless = CHAT_TEMPLATE.replace(END, "")
    (path / "chat_template.jinja").write_text(endless)
    with pytest.raises(ValueError, match="none of the model's end-of-turn tokens"):
        DialogueEncoder(str(path)).encode(messages(DIALOGUE))


def test_tokens_are_those_of_a_rollout(encoder: DialogueEncoder, model_path: str):
    from agent_r1.text.chat_format import ChatFormat, OutsideMessage
    from agent_r1.text.chat_template import load_tokenizer

    tokenizer = load_tokenizer(model_path)
    chat = ChatFormat(tokenizer, end_of_turn_ids=[2])
    backend = tokenizer.backend_tokenizer
    expected = list(chat.render_prompt(messages(DIALOGUE[:2])).token_ids)
    expected += backend.encode(DIALOGUE[2][1] + END, add_special_tokens=False).ids
    result = DIALOGUE[3][1]
    expected += chat.encode_reply([OutsideMessage("tool", result, chat.encode_text(result))])
    expected += backend.encode(DIALOGUE[4][1] + END, add_special_tokens=False).ids
    assert encoder.encode(messages(DIALOGUE)).token_ids.tolist() == expected


CONTROL = [END, "<|im_start|>", "<|endoftext|>"]


@given(
    st.lists(st.lists(st.sampled_from([*CONTROL, "<|", "im_end|>", " é"])), min_size=6, max_size=6)
)
def test_no_text_of_a_demonstration_becomes_a_control_token(
    encoder: DialogueEncoder, pieces: list[list[str]]
):
    def encoded(texts: list[str]) -> EncodedDialogue:
        dialogue = [
            (role, f"{said}{text}x") for (role, said), text in zip(DIALOGUE, texts[:5], strict=True)
        ]
        tool = {"type": "function", "function": {"name": "f", "description": texts[5]}}
        return encoder.encode(messages(dialogue), [tool])

    def controls(texts: list[str]) -> list[tuple[int, bool]]:
        found = encoded(texts)
        tokens = zip(found.token_ids.tolist(), found.assistant_mask.tolist(), strict=True)
        return [(token, said) for token, said in tokens if token in control_ids]

    vocabulary = build_tokenizer().get_vocab()
    control_ids = {vocabulary[token] for token in CONTROL}
    texts = ["".join(piece) for piece in pieces]
    assert controls(texts) == controls([""] * 6)
    assert decode(encoded(texts).token_ids.tolist()).count(texts[1] + "x") >= 1


SHOWS_CALLS = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_a_call_is_said_as_the_template_writes_it(tmp_path: Path):
    path = save_model(tmp_path / "model", layers=1)
    (path / "chat_template.jinja").write_text(SHOWS_CALLS)
    call = {"function": {"name": "search", "arguments": '{"q": "<|im_end|>"}'}}
    dialogue = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Ann"},
        {"role": "assistant", "content": "Ann"},
    ]
    encoded = DialogueEncoder(str(path)).encode(list(map(ChatMessage.model_validate, dialogue)))
    said = [text for is_said, text in stretches(encoded) if is_said]
    assert said == [f'<tool_call>search {{"q": "{END}"}}</tool_call>{END}', f"Ann{END}"]
    # Four messages end; the end token in the argument is spelled out.
    end = build_tokenizer().convert_tokens_to_ids(END)
    assert encoded.token_ids.tolist().count(end) == 4
