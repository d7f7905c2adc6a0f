"""Which chat templates write calls as they are read. The templates are short ones of the kinds
that real models have: the tools in the system message, and the call in the model's own markup."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.rollout.config import EnvConfig
from agent_r1.rollout.main import build_chat_format
from agent_r1.text.chat_template import ChatTemplateError
from agent_r1.text.template_checks import check_call_format
from agent_r1.text.tool_formats import BUILTIN_FORMATS
from agent_r1_proto.tools import ToolSpec
from tests.support.fakes import HERMES_TEMPLATE, build_tokenizer

SEARCH = ToolSpec(
    name="search",
    version="1",
    description="Finds.",
    parameters={"type": "object", "properties": {"query": {"type": "string"}}},
)


def template(call: str, *, told: str = "") -> str:
    """A template that writes a call as `call`, an expression over `f`, and tells `told`."""
    return (
        "{%- if tools %}{{- '<|im_start|>system\n' }}"
        "{%- for tool in tools %}{{ tool | tojson }}{% endfor %}"
        f"{{{{- {told!r} + '<|im_end|>\n' }}}}{{% endif -%}}"
        "{%- for m in messages -%}"
        "{{- '<|im_start|>' + m.role + '\n' + (m.content or '') -}}"
        "{%- for c in m.tool_calls or [] %}{% set f = c.function %}"
        f"{call}{{% endfor -%}}"
        "{{- '<|im_end|>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
    )


HERMES = """{{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}{{ f.arguments | tojson }}
{{- '}\n</tool_call>' }}"""
HERMES_OF_STRINGS = (
    """{{- '<tool_call>{"name": "' + f.name + '", "arguments": ' + f.arguments """
    """+ '}</tool_call>' }}"""
)
LLAMA = """{{- '{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}{{ '}' }}"""
MISTRAL = """{{- '[TOOL_CALLS] [{"name": "' + f.name + '", "arguments": ' }}
{{- f.arguments | tojson }}{{ ', "id": "' + c.id + '"}]' }}"""
PARAMETERS = HERMES.replace("arguments", "parameters", 1)
XML = """{{- '<tool_call>\n<function=' + f.name + '>' }}{% for k, v in f.arguments.items() -%}
{{ '\n<parameter=' + k + '>\n' }}{{ v }}{{ '\n</parameter>' }}{% endfor -%}
{{ '\n</function>\n</tool_call>' }}"""
TWICE = HERMES + HERMES
IN_A_THOUGHT = "{{- '<think>' }}" + HERMES + "{{- '</think>' }}"
BESIDE = "put a chat_template.jinja that has it beside the model"
AS_TEXT = """{{- '<tool_call>{"name": "' + f.name + '", "arguments": ' }}
{{- f.arguments | tojson | tojson }}{{ '}</tool_call>' }}"""


def check(text: str, reads: str = "hermes") -> str | None:
    return check_call_format(build_tokenizer(template=text), BUILTIN_FORMATS[reads], [SEARCH])


@pytest.mark.parametrize("call", [HERMES, HERMES_OF_STRINGS])
def test_a_template_that_writes_hermes_calls_is_fine(call: str):
    assert check(template(call)) is None


@pytest.mark.parametrize(
    ("call", "seen", "remedy"),
    [
        (
            LLAMA,
            '{"name": "search", "parameters": {"text": "Value-7f3a"',
            'set env.tool_format = "llama3_json"',
        ),
        (
            MISTRAL,
            '[TOOL_CALLS] [{"name": "search", "arguments": {"text"',
            'set env.tool_format = "mistral"',
        ),
        (PARAMETERS, '"parameters": {"text"', 'set env.tool_format = "llama3_json"'),
        (XML, "<function=search>", BESIDE),
        (TWICE, "<tool_call>", BESIDE),
        (IN_A_THOUGHT, "<think><tool_call>", BESIDE),
        (AS_TEXT, "Value-7f3a", BESIDE),
    ],
)
def test_a_template_that_writes_other_calls_is_refused(call: str, seen: str, remedy: str):
    with pytest.raises(ChatTemplateError) as caught:
        check(template(call))
    message = str(caught.value)
    assert seen in message
    assert '<tool_call>{"name": ..., "arguments": {...}}</tool_call>' in message
    assert remedy in message


@pytest.mark.parametrize(("call", "reads"), [(LLAMA, "llama3_json"), (MISTRAL, "mistral")])
def test_the_format_of_the_template_is_fine(call: str, reads: str):
    assert check(template(call), reads) is None


def test_a_hermes_template_is_refused_where_another_format_is_read():
    with pytest.raises(ChatTemplateError, match=r'set env\.tool_format = "hermes"'):
        check(template(HERMES), "mistral")


@pytest.mark.parametrize(
    "told",
    [
        'Answer with {"name": function name, "parameters": its arguments}.',
        "Write [TOOL_CALLS] before a call.",
    ],
)
def test_a_template_that_only_tells_another_format_is_refused(told: str):
    # It drops the calls of a dialogue; the tools' own "parameters" must not be taken for a format.
    with pytest.raises(ChatTemplateError, match="tells the model about calls with"):
        check(template("", told=told))


def test_a_template_that_only_tells_the_hermes_format_is_fine():
    told = '<tool_call>{"name": the name, "arguments": the arguments}</tool_call>'
    assert check(template("", told=told)) is None


def test_a_template_that_says_nothing_of_calls_is_remarked_upon():
    remark = check(HERMES_TEMPLATE)
    assert remark is not None
    assert "env.system_prompt" in remark


def test_a_template_that_raises_at_a_call_is_refused():
    raising = template("{{ raise_exception('no calls, please') }}")
    with pytest.raises(ChatTemplateError, match="no calls, please"):
        check(raising)


def test_without_tools_any_template_will_do():
    tokenizer = build_tokenizer(template=template(LLAMA))
    assert check_call_format(tokenizer, BUILTIN_FORMATS["hermes"], []) is None


def test_rollout_refuses_such_a_template_at_start(tmp_path: Path):
    tokenizer = build_tokenizer(template=template(LLAMA))
    tokenizer.save_pretrained(tmp_path)
    end = (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    with pytest.raises(ChatTemplateError, match="parameters"):
        build_chat_format(EnvConfig(), str(tmp_path), end, has_tools=True)
    build_chat_format(EnvConfig(), str(tmp_path), end, has_tools=False)
    build_chat_format(EnvConfig(enable_tools=[]), str(tmp_path), end, has_tools=True)
