"""Says in ten minutes whether this machine trains, and what is wrong where it does not.

    python -m scripts.gpu_test [--device cpu] [--variants NAME,...] [--steps 8] [--out FOLDER]

Looks at the machine, then starts the sampling engine, the training engine and the whole loop, all
with a random model of Qwen2.5-0.5B's shape in bfloat16. A part that lacks something says so, and
the others run. Writes `report.json` and `report.txt` in any case, to attach to a bug, into
`runs/test-gpu` or FOLDER, in place of an earlier report and what was made for it; a folder that
holds anything else is refused. `--device cpu` does the same with a tiny model.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from agent_r1.cli.declare import integer
from agent_r1.config.gpu_checks import unused_gpus
from agent_r1.runtime.exit_status import EXIT_REASON
from agent_r1.runtime.files.disk_space import require_room
from agent_r1.runtime.gpus import read_gpus
from scripts.gpu_test import engine, machine, report
from scripts.gpu_test.loop import VARIANTS, Variant, run_variant
from scripts.gpu_test.model import EXAMPLE, SHAPES, make_model
from scripts.gpu_test.parts import (
    ENDED,
    ENGINES,
    ROOT,
    Part,
    answer_signals,
    failure,
    interrupt,
    left_out,
    missing,
    reason,
    run_process,
)

OUT = ROOT / "runs" / "test-gpu"
LIMIT_S = 570.0
"""Of the parts without variants: with set-up, at most ten minutes."""
VARIANT_S = 240.0
"""More for each variant."""
LEAST_S = 30.0
"""A part that would get less time is left out."""
PARTS = {"engine": 200.0, "learner": 120.0}
"""Most seconds of each."""
LOOP = "loop: "
"""Before the name of a variant: that of its part."""
ROOM = {"cuda": 1.0e9, "cpu": 5e6}
"""Bytes of model and world; what the parts write comes on top."""
MADE = {report.JSON, report.TEXT, "model", "world", *PARTS, *VARIANTS}
"""What a folder holds after a diagnosis, and nothing else."""


def why_not(variant: Variant, device: str) -> str | None:
    """Say why a variant cannot run here; None: it can."""
    if device == "cuda" and len(read_gpus()) < variant.gpus:
        return f"it needs {variant.gpus} GPUs, and this machine has {len(read_gpus())}"
    if device == "cpu" and not variant.on_cpu:
        return "it runs on GPUs only"
    return missing("torch", "|".join(ENGINES), "deepspeed") or machine.missing_redis()


def alone(name: str, out: Path, device: str, left_s: float) -> Part:
    """Run an engine alone."""
    if why := missing("torch", "|".join(ENGINES) if name == "engine" else "deepspeed"):
        return left_out(name, why)
    arguments = [str(out / "model"), device]
    part = run_process(name, arguments, out / name, min(left_s, PARTS[name]))
    if name == "engine":
        log = out / name / "part.log"
        part.figures |= engine.read_log(log.read_text(encoding="utf-8", errors="replace"))
    return part


def run_part(name: str, out: Path, device: str, steps: int, left_s: float) -> Part:
    """Run an engine alone, or the loop in a variant, in the seconds that are left."""
    if name in PARTS:
        return alone(name, out, device, left_s)
    variant = name.removeprefix(LOOP)
    if why := why_not(VARIANTS[variant], device):
        return left_out(name, why)
    return run_variant(variant, out, device, steps, left_s)


def prepare(out: Path, device: str) -> str | None:
    """Make model and world; return why that is not possible, or None.

    Raises:
        ValueError: there is no room for them.
        RuntimeError: the world was not made; says why.
    """
    why = missing("torch", "transformers")
    if why is None and device == "cuda":
        why = unused_gpus() or machine.missing_gpu()
    if why is not None:
        return why
    require_room("model and world", out, ROOM[device], "name another folder with --out")
    make_model(out / "model", SHAPES[device])
    generate = [sys.executable, str(EXAMPLE / "generate.py"), "--no-sft", "--out"]
    done = subprocess.run([*generate, str(out / "world")], capture_output=True, text=True)
    if done.returncode != 0:
        (*_, last) = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise RuntimeError(f"the world was not made: {last}")
    return None


def run_all(device: str, variants: list[str], out: Path, steps: int) -> list[Part]:
    """Run every part, whatever becomes of the others; what ends them all is the last outcome."""
    parts: list[Part] = []
    try:
        for part in each_part(device, variants, out, steps):
            parts.append(part)
            print(report.line(part), flush=True)
            if part.outcome.startswith(ENDED):
                break
    except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - the report says so
        parts.append(Part("diagnosis", reason(exc)))
    return parts


def each_part(device: str, variants: list[str], out: Path, steps: int) -> Iterator[Part]:
    """Yield every part when it has run."""
    started = time.monotonic()
    limit_s = LIMIT_S + VARIANT_S * len(variants)
    yield attempt(report.MACHINE, lambda: machine.look(device), out)
    try:
        why = prepare(out, device)
    except Exception as exc:  # noqa: BLE001 - the report says so
        yield Part("preparation", failure(exc, out))
        why = "the preparation failed"
    for name in [*PARTS, *(f"{LOOP}{variant}" for variant in ["plain", *variants])]:
        left_s = limit_s - (time.monotonic() - started)
        if why is not None:
            yield left_out(name, why)
        elif left_s < LEAST_S:
            yield left_out(name, f"{left_s:.0f} of {limit_s:.0f} s were left")
        else:
            print(f"{name} ...", flush=True)
            part = functools.partial(run_part, name, out, device, steps, left_s)
            yield attempt(name, part, out)


def attempt(name: str, run: Callable[[], Part], out: Path) -> Part:
    """Run a part; one that fails does not keep the others from running."""
    try:
        return run()
    except Exception as exc:  # noqa: BLE001 - the report says so
        return Part(name, failure(exc, out))


def own_folder(out: Path, device: str) -> str | None:
    """Make a folder for the report, without an earlier one; say why that is not possible, or None.

    The folder itself may be a mount point, which cannot be removed.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        old = {one.name: one for one in out.iterdir()}
        if old and not (old.keys() <= MADE and report.is_there(out)):
            return f"--out ({out}) holds files that are not of a report; name another folder"
        for one in (one for name, one in old.items() if name not in (report.JSON, report.TEXT)):
            shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()
        report.begin(out, device)  # what ends at once may be followed by another diagnosis
    except OSError as exc:
        return f"--out ({out}) cannot be written: {exc.strerror or exc}; name another folder"
    return None


def main() -> int:
    """Run the parts and write the report; 1 where one of them failed, 2 without a folder."""
    parser = argparse.ArgumentParser(prog="gpu_test", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(SHAPES), default="cuda")
    parser.add_argument(
        "--variants",
        default="",
        help=f"of the loop, separated by commas, four minutes each: {', '.join(VARIANTS)}, or all",
    )
    parser.add_argument("--steps", type=integer(1), default=8, help="of the loop (default: 8)")
    out_help = (
        "for the report: a folder that is new, empty, or holds an earlier report, which is "
        "replaced (default: runs/test-gpu)"
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help=out_help)
    arguments = parser.parse_args()
    names = [name for name in arguments.variants.split(",") if name and name != "plain"]
    variants = [name for name in VARIANTS if name != "plain"] if names == ["all"] else names
    if unknown := [name for name in variants if name not in VARIANTS]:
        parser.error(f"--variants names {unknown[0]!r}; there are {', '.join(VARIANTS)} and all")
    device, out = arguments.device, arguments.out.absolute()
    if (problem := own_folder(out, device)) is not None:
        parser.exit(EXIT_REASON, f"{parser.prog}: error: {problem}\n")
    answer_signals(interrupt)
    parts = run_all(device, variants, out, arguments.steps)
    answer_signals(signal.SIG_IGN)  # a second one does not keep the report from being written
    print(report.write(out, device, parts), end="")
    return 0 if report.passed(parts) else 1


if __name__ == "__main__":
    sys.exit(main())
