"""What `agent-r1 check` finds in code and models that a configuration names."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch  # noqa: F401 - the probe has transformers do without it where it is not there yet

from agent_r1.config import checks as config_checks
from agent_r1.config import code as config_code
from agent_r1.config import probe
from agent_r1.config.findings import Findings
from agent_r1.config.run import load_config
from agent_r1_proto.tasks import Task
from tests.support.config_scene import RUN_TOML, write_scene

TOOL = """
from agent_r1 import Tool

class Good(Tool):
    name = "good"
    description = "Is fine."
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}

    def __init__(self, level=1):
        print("said on standard output")

    async def call(self, arguments, context):
        return "x"
"""


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = write_scene(tmp_path / "example").parent
    (place / "mine").mkdir()
    toml = RUN_TOML.replace('dir = "runs/demo"', 'dir = "runs/demo"\nplugins = ["mine"]')
    (place / "run.toml").write_text(toml)
    (place / "mine" / "good_tools.py").write_text(TOOL)
    return place


def write(folder: Path, name: str, text: str) -> None:
    (folder / "mine" / f"{name}.py").write_text(text)


def loaded(
    folder: Path,
    *options: str,
    model: bool = False,
    machine: bool = False,
    prompts: Mapping[str, Task] | None = None,
    elsewhere: bool = False,
) -> Findings:
    """Load what the configuration names; only the code, unless the model is asked for.

    `elsewhere` does it in the process that is made for that, whose imports take seconds.
    """
    config = load_config(folder / "run.toml", options, {}).config
    config_checks.use_plugins(config)
    with pytest.MonkeyPatch.context() as patch:
        if not elsewhere:
            patch.setattr(config_code, "_run", probe_here)
        return config_code.load_everything(
            config,
            trains=True,
            samples=True,
            model=model,
            machine=machine,
            task=Task(id="t", prompt="Where?"),
            prompts=prompts,
        )


def probe_here(request: probe.ProbeRequest) -> tuple[list[probe.Report], None]:
    known = set(sys.modules)
    here, there = Pipe(duplex=False)
    with here, there:
        probe.probe(request, there)
        there.close()
        reports = list(config_code._reports(here))
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent.name == "mine":
            del sys.modules[name]
    return [report for report in reports if report is not None], None


def tool(name: str, type_: str, **settings: object) -> list[str]:
    table = json.dumps(settings).replace('": ', '" = ')
    return [f"tools.{name}.type={type_}", f"tools.{name}.settings={table}"]


def test_code_that_is_fine_is_loaded_elsewhere_and_tells_what_the_tools_are(folder: Path):
    findings = loaded(folder, *tool("good", "good_tools:Good", level=2), elsewhere=True)
    assert (findings.problems, findings.machine) == ([], [])
    assert findings.specs["good"].description == "Is fine."
    assert set(findings.specs["search"].parameters["properties"]) == {"query"}
    assert "good_tools" not in sys.modules


def test_a_module_that_has_moved_is_answered_with_its_new_name(folder: Path):
    old = "agent_r1.tools.code_tests"
    for name in ("tool", "environment", "reward", "loss"):
        write(folder, f"old_{name}", f"from {old} import CodeTests")
    options = [
        *tool("code_tests", f"{old}:CodeTests"),
        *tool("mine", "old_tool:Mine"),
        "env.type=old_environment:Env",
        "reward.components={'old_reward:score' = 1.0}",
        "learner.policy_loss=old_loss:loss",
    ]
    problems = loaded(folder, *options).problems
    assert len(problems) == 5
    answer = f"{old} is now agent_r1.tools.sandbox.code_tests"
    assert [problem for problem in problems if answer not in problem] == []


def test_every_fault_of_user_code_is_named_at_once(folder: Path):
    write(folder, "raising", "raise RuntimeError('no licence file')")
    write(folder, "leaving", "import sys\nsys.exit('bye')")
    write(folder, "many", TOOL.replace("class Good", "class Base") + MANY)
    options = [
        *tool("missing", "nomodule:Tool"),
        *tool("raising", "raising:Tool"),
        *tool("leaving", "leaving:Tool"),
        *tool("kind", "many:NoTool"),
        *tool("constructor", "many:Constructor"),
        *tool("settings", "many:Good", levle=3),
        *tool("opens", "many:Opens"),
        *tool("calls", "many:Calls"),
        *tool("closes", "many:Closes"),
        *tool("schema", "many:Schema"),
        *tool("named", "many:Base"),
        *tool("python_exec", "python_exec", cpu=1),
        *tool("mcp_tool", "mcp", tool="x"),
        "env.type=many:Env",
        "reward.components={'many:Scorer' = 1.0, 'many:score' = 1.0, 'nomodule:f' = 1.0}",
        "learner.advantage=many:score",
        "learner.policy_loss=many:score",
    ]
    problems = loaded(folder, *options).problems
    expected = {
        "env.type (many:Env)": "step(self, turn) cannot be called: too many positional arguments",
        "tools.missing.type": "module nomodule cannot be imported",
        "tools.raising.type": "cannot be imported: RuntimeError: no licence file",
        "tools.leaving": "SystemExit: bye",
        "tools.kind.type": "(many:NoTool) is not a subclass of agent_r1.Tool",
        "tools.constructor": "Constructor(...) raised OSError: no such index",
        "tools.settings.settings": "unexpected keyword argument 'levle'",
        "tools.opens": "write `async def open(self, rollout_id, tool_context)`",
        "tools.calls": "call is not async; write `async def call`",
        "tools.closes": "write `async def close(self, rollout_id)`",
        "tools.schema": "Schema.parameters is not a valid JSON Schema",
        "[tools.named]": "whose name is 'good'",
        "tools.python_exec": "cpu is unknown; did you mean cpu_s?",
        "tools.mcp_tool": "set exactly one of command",
        "reward.components": "'many:Scorer' is not a function",
        "reward.components: many:score": "many:score() is called as",
        "reward.components (nomodule:f)": "module nomodule cannot be imported",
        "learner.advantage": "must be a class derived from",
        "learner.policy_loss": "is called as",
    }
    for key, text in expected.items():
        assert [p for p in problems if key in p and text in p], (key, text, problems)
    assert len(problems) == len(expected)
    assert not [p for p in problems if "\n" in p]


MANY = """
from agent_r1 import ToolEnv

class NoTool:
    pass

class Good(Base):
    pass

class Constructor(Base):
    def __init__(self):
        raise OSError("no such index")

class Opens(Base):
    name = "opens"
    async def open(self, context):
        pass

class Calls(Base):
    def call(self, arguments, context):
        return ""

class Closes(Base):
    async def close(self):
        pass

class Schema(Base):
    parameters = {"type": "object", "properties": {"x": {"type": "strin"}}}

class Env(ToolEnv):
    async def step(self, turn):
        pass

class Scorer:
    def __call__(self, request):
        return 1.0

def score():
    return 1.0
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def __init__(self, task):\n        task.nothing", "'Task' object has no attribute"),
        ("def close(self):\n        pass", "close is not async"),
        ("async def close(self):\n        1 / 0", "ZeroDivisionError"),
    ],
)
def test_an_environment_is_constructed_with_a_task_and_closed(
    folder: Path, body: str, expected: str
):
    write(folder, "envs", f"from agent_r1 import ToolEnv\n\nclass Env(ToolEnv):\n    {body}\n")
    (problem,) = loaded(folder, "env.type=envs:Env").problems
    assert "env.type (envs:Env)" in problem
    assert expected in problem


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "import os, sys; sys.stderr.write('a\\nlibfoo is missing\\n'); os._exit(3)",
            "ended with status 3: libfoo is missing",
        ),
        ("import os; os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
    ],
)
def test_code_that_crashes_hides_no_other_fault(folder: Path, body: str, expected: str):
    dying = f"\nclass Dying(Good):\n    def __init__(self):\n        {body}\n"
    write(folder, "dying", TOOL + dying)
    write(folder, "broken", "no_such_name")
    options = [*tool("dying", "dying:Dying"), *tool("broken", "broken:Tool")]
    findings = loaded(folder, *options, elsewhere=True)
    first, second = findings.problems
    assert first.startswith("tools.dying: ")
    assert expected in first
    assert "NameError" in second
    assert "search" in findings.specs


@pytest.mark.slow
def test_code_that_hangs_hides_no_other_fault(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config_code, "PART_TIMEOUT_S", 15.0)
    write(folder, "hanging", "import threading\nthreading.Event().wait()")
    write(folder, "broken", "no_such_name")
    options = ["env.type=hanging:Env", "learner.advantage=broken:f"]
    first, second = loaded(folder, *options, elsewhere=True).problems
    assert (
        "env.type (hanging:Env): it did not load within 15 s; a constructor must be quick" in first
    )
    assert "NameError" in second


# --- The model -----------------------------------------------------------------------------------

AS_LLAMA = {"<tool_call>": "", "</tool_call>": "", '"arguments"': '"parameters"'}


def test_a_template_with_other_calls_is_found(folder: Path):
    model = folder / "model"
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    for ours, theirs in AS_LLAMA.items():
        assert ours in template
        template = template.replace(ours, theirs)
    (model / "chat_template.jinja").write_text(template)
    findings = loaded(folder, model=True)
    (problem,) = findings.problems
    assert f"model.path ({model})" in problem
    assert '{"name":"search","parameters":{"text"' in problem
    assert '<tool_call>{"name": ..., "arguments": {...}}</tool_call>' in problem
    assert 'set env.tool_format = "llama3_json"' in problem


def test_a_format_that_cannot_be_loaded_is_named_once_where_prompts_are_measured(folder: Path):
    options = ["env.tool_format=nowhere:Format", "data.max_prompt_tokens=64"]
    config = load_config(folder / "run.toml", options, {}).config
    (problem,) = config_checks.find(config, "train", machine=False).problems
    assert "env.tool_format (nowhere:Format): module nowhere cannot be imported" in problem


def refusing(folder: Path, condition: str, words: str) -> None:
    """Let the template of the model refuse a dialogue."""
    file = folder / "model" / "chat_template.jinja"
    template = file.read_text()
    file.unlink()
    raising = f"{{%- if {condition} -%}}{{{{ raise_exception('{words}') }}}}{{%- endif -%}}"
    file.write_text(raising + template)


def test_a_system_prompt_that_the_template_refuses_is_found(folder: Path):
    refusing(folder, "messages[0].role == 'system'", "no system message please")
    assert loaded(folder, model=True).problems == []
    (problem,) = loaded(folder, "env.system_prompt=Be brief.", model=True).problems
    assert "env.system_prompt: the chat template cannot render a dialogue of the roles" in problem
    assert "no system message please; leave it out, put its text into the prompts" in problem


def test_prompts_that_the_template_refuses_are_named(folder: Path):
    refusing(
        folder, "messages[:2] | map(attribute='role') | list == ['user', 'user']", "take turns"
    )
    said = [{"role": "user", "content": "Here is a text."}, {"role": "user", "content": "Who?"}]
    prompts = {
        "train.jsonl:1": Task(id="a", prompt="Where?"),
        "train.jsonl:7": Task.model_validate({"id": "b", "prompt": said}),
    }
    (problem,) = loaded(folder, model=True, prompts=prompts).problems
    assert problem.startswith("train.jsonl:7: the chat template cannot render a dialogue of the ")
    assert "user, user: take turns; correct the prompt, or put a chat_template.jinja" in problem


def test_a_message_behind_a_result_that_the_template_refuses_is_found(folder: Path):
    write(
        folder,
        "talking",
        "from agent_r1 import ToolEnv\n\nclass Talking(ToolEnv):\n    sends_messages = True\n",
    )
    refusing(folder, "messages[-2:] | map(attribute='role') | list == ['tool', 'user']", "no user")
    assert loaded(folder, model=True).problems == []
    (problem,) = loaded(folder, "env.type=talking:Talking", model=True).problems
    assert "the roles user, assistant, tool, user: no user" in problem


def test_a_head_size_without_a_kernel_is_a_fault_of_this_machine(folder: Path):
    model = folder / "model"
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps({**values, "head_dim": 24}))
    findings = loaded(folder, model=True, machine=True)
    assert findings.problems == []
    (problem,) = findings.machine
    assert "attention heads have size 24; vLLM on the CPU runs 32, 64" in problem


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["model.max_context=8192"], "model.max_context (8192) exceeds the 4096 positions of"),
        # The layers of this model are 128 wide and more.
        (["model.lora.rank=129"], "model.lora.rank (129) must be <= 128, the smaller side of"),
        (["model.lora.rank=8", "model.lora.targets=['query']"], "names 'query', and the model has"),
        (["model.lora.rank=8", "model.lora.path=nowhere"], "nowhere holds no LoRA adapter"),
    ],
)
def test_what_does_not_fit_the_weights_is_found(folder: Path, options: list[str], expected: str):
    (problem,) = loaded(folder, *options, model=True).problems
    assert expected in problem


def test_a_model_without_a_chat_template_is_refused(folder: Path):
    (folder / "model" / "chat_template.jinja").unlink()
    (problem,) = loaded(folder, model=True).problems
    assert "has no chat template; put a chat_template.jinja beside the model" in problem


@pytest.mark.parametrize(
    ("prompt", "wrong"),
    [
        (None, "cannot be read"),
        ("How good was $anser?", "names $anser; a prompt may name $question"),
        ("It costs $5: $answer?", "has a lone dollar sign"),
        ("How good was $answer?", None),
    ],
)
def test_the_prompt_of_a_judge_is_read(folder: Path, prompt: str | None, wrong: str | None):
    file = folder / "prompt.txt"
    if prompt is not None:
        file.write_text(prompt)
    judge = f'{{url = "http://127.0.0.1:9/v1", model = "m", prompt_file = "{file}"}}'
    options = ("reward.components={judge = 1.0}", f"reward.servers.judge={judge}")
    problems = loaded(folder, *options).problems
    assert len(problems) == (wrong is not None), problems
    if wrong is not None:
        assert f"reward.servers.judge.prompt_file ({file})" in problems[0]
        assert wrong in problems[0]


def test_a_module_that_several_parts_need_is_described_once(folder: Path):
    write(folder, "torn", "x = 1\nclass Env(:\n")
    options = [
        *tool("one", "torn:One"),
        "env.type=torn:Env",
        "reward.components={'torn:score' = 1.0}",
    ]
    first, *others = loaded(folder, *options).problems
    assert first == (
        "env.type (torn:Env): module torn cannot be imported: SyntaxError: invalid syntax "
        "(torn.py, line 2)"
    )
    assert others == [
        "tools.one.type (torn:One): module torn cannot be imported: as for env.type (torn:Env)",
        "reward.components (torn:score): module torn cannot be imported: as for env.type "
        "(torn:Env)",
    ]
