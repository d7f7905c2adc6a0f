"""Loads the code and the model that a configuration names, in a process made for that.

checks.py asks `load_everything`; probe.py, in that process, imports and constructs.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import BinaryIO

from agent_r1.config.findings import Check, Findings
from agent_r1.config.probe import ProbeRequest, Report
from agent_r1.config.run import Config
from agent_r1.learner.algorithms import ADVANTAGES, POLICY_LOSSES
from agent_r1_proto.tasks import Task

PART_TIMEOUT_S = 60.0
"""Longest one part (importing and constructing one tool, say) may take."""
EXIT_TIMEOUT_S = 2.0


def load_everything(
    config: Config,
    *,
    trains: bool,
    samples: bool,
    model: bool,
    machine: bool,
    memory: bool = True,
    task: Task | None,
    prompts: Mapping[str, Task] | None = None,
) -> Findings:
    """Import and construct the tools, environment, rewards and functions; load the tokenizer.

    Args:
        config: names them.
        trains: the learner's functions are needed.
        samples: tools, environment and reward are needed, and the chat template with calls.
        model: the model is there, so that its tokenizer can be loaded.
        machine: also check what depends on this machine.
        memory: of this, also check whether an engine fits in its memory.
        task: some task, to construct the environment with.
        prompts: tasks whose prompts are rendered, by file and line.
    """
    functions = {
        "learner.advantage": config.learner.advantage,
        "learner.policy_loss": config.learner.policy_loss,
    }
    own = {k: v for k, v in functions.items() if v not in ADVANTAGES and v not in POLICY_LOSSES}
    request = ProbeRequest(
        model=config.model if model else None,
        env=config.env,
        tools=config.served_tools() if samples else {},
        reward=config.reward if samples else None,
        rollout=config.rollout,
        functions=own if trains else {},
        advantage_parameters=config.learner.advantage_parameters
        if "learner.advantage" in own
        else {},
        drops_equal_groups=config.learner.drop_equal_groups,
        task=task,
        prompts=dict(prompts or {}),
        offered=list(config.tools) if config.env.enable_tools is None else config.env.enable_tools,
        samples=samples,
        machine=machine,
        memory=memory,
    )
    return _load(request.model_dump_json(exclude_unset=True))


@functools.lru_cache(maxsize=64)  # the rows of a table ask for the same things
def _load(request: str) -> Findings:
    asked = ProbeRequest.model_validate_json(request)
    died: list[Check] = []
    failed: list[str] = []
    while True:
        reports, end = _run(asked.model_copy(update={"skip": failed}))
        if end is None:
            break
        part, why = end
        died.append(Check(part, "", [f"{part}: {why}"], here=False))
        if not part or part in failed:
            break
        failed.append(part)
    specs = {report.spec.name: report.spec for report in reports if report.spec is not None}
    return Findings([*died, *_checks(reports)], specs)


def _checks(reports: Sequence[Report]) -> Iterator[Check]:
    """Yield each part that was loaded, with what was said of it."""
    part, said = "", dict[str, list[str]]()
    for report in reports:
        if report.kind == "part":
            part, said = report.text, {"problem": [], "note": []}
            yield Check(part, "loaded", said["problem"], said["note"], here=False)
        elif report.kind == "machine":
            yield Check(part, "", [report.text])
        elif report.kind in said:
            said[report.kind].append(report.text)


def _run(request: ProbeRequest) -> tuple[list[Report], tuple[str, str] | None]:
    """Run one probe; return its reports, and the part it did not survive with the reason."""
    out, probes = multiprocessing.Pipe(duplex=False)
    with out, tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as errors:
        asked.write(request.model_dump_json(exclude_unset=True).encode())
        asked.seek(0)
        process = subprocess.Popen(
            # -P: the folder the command runs in must not shadow installed packages.
            [sys.executable, "-P", "-m", "agent_r1.config.probe", str(probes.fileno())],
            stdin=asked,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=(probes.fileno(),),
            start_new_session=True,
        )
        probes.close()
        reports: list[Report] = []
        in_time = True
        try:
            for report in _reports(out):
                in_time = report is not None
                if report is not None:
                    reports.append(report)
        finally:
            _end(process, EXIT_TIMEOUT_S if in_time else 0.0)
        if reports and reports[-1].kind == "end":
            return reports, None
        part = next((r.text for r in reversed(reports) if r.kind == "part"), "")
        if not in_time:
            return reports, (
                part,
                f"it did not load within {PART_TIMEOUT_S:g} s; a constructor must be quick: move "
                "slow work to where it is used (`start` of a tool)",
            )
        errors.seek(0)
        return reports, (part, f"the process that loaded it {_how_it_ended(process, errors)}")


def _reports(out: Connection) -> Iterator[Report | None]:
    """Yield reports until the probe ends; None when a part takes too long."""
    with contextlib.suppress(EOFError):
        while out.poll(PART_TIMEOUT_S):
            yield Report.model_validate_json(out.recv_bytes())
        yield None


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """End the probe, and whatever user code has started in it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _how_it_ended(process: subprocess.Popen[bytes], errors: BinaryIO) -> str:
    code = process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    lines: Sequence[str] = errors.read().decode(errors="replace").strip().splitlines()
    return f"{how}: {lines[-1].strip()}" if lines else how
