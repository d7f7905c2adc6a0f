"""How much memory is left: of the machine, or of the control group of a container."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1.runtime import memory

REPOSITORY = Path(__file__).parents[3]
V2 = ("memory.max", "memory.current", "memory.stat", "inactive_file")
V1 = (
    "memory/memory.limit_in_bytes",
    "memory/memory.usage_in_bytes",
    "memory/memory.stat",
    "total_inactive_file",
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8000 KiB of memory, 3000 KiB of them available, without control groups."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  8000 kB\nMemFree: 10 kB\nMemAvailable:   3000 kB\nHuge: 0\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "cgroup")
    return tmp_path


def allow(machine: Path, files: tuple[str, ...], limit: str, used: int, unused: int) -> None:
    texts = (limit, str(used), f"anon 5\n{files[3]} {unused}\nactive_file 7\n")
    for name, text in zip(files[:3], texts, strict=True):
        path = machine / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_without_control_groups_the_machine_decides(machine: Path):
    assert memory.meminfo_bytes("MemTotal") == 8000 * 1024
    assert memory.meminfo_bytes("Huge") == 0
    assert memory.meminfo_bytes("Other") is None
    assert memory.free_memory_bytes() == 3000 * 1024


@pytest.mark.parametrize("files", [V1, V2])
@pytest.mark.parametrize(
    ("limit", "used", "unused", "free"),
    [
        ("1000000", 300_000, 0, 700_000),
        ("1000000", 300_000, 200_000, 900_000),  # files that were read count as used
        ("1000000", 1_000_100, 0, 0),
        ("9223372036854771712", 300_000, 0, 3000 * 1024),  # version 1 says "no limit" like this
        ("max", 300_000, 0, 3000 * 1024),
    ],
)
def test_a_container_may_take_less_than_the_machine_has(
    machine: Path, files: tuple[str, ...], limit: str, used: int, unused: int, free: int
):
    allow(machine, files, limit, used, unused)
    assert memory.free_memory_bytes() == free


@pytest.mark.parametrize("text", [None, "", "MemAvailable:\n", "MemAvailable: many kB\n"])
def test_a_system_that_does_not_say_is_unknown(machine: Path, text: str | None):
    allow(machine, V2, "1000000", 0, 0)
    memory.MEMINFO.unlink() if text is None else memory.MEMINFO.write_text(text)
    assert memory.free_memory_bytes() is None


def test_this_machine_has_memory():
    free, total = memory.free_memory_bytes(), memory.meminfo_bytes("MemTotal")
    assert free is not None
    assert total is not None
    assert 0 < free < total


def test_it_can_be_asked_before_anything_is_installed():
    ast.parse(Path(memory.__file__).read_text(), feature_version=(3, 7))
    code = """
import sys, types
sys.modules["agent_r1"] = package = types.ModuleType("agent_r1")
package.__path__ = ["services"]
from agent_r1.runtime.memory import free_memory_bytes
print(free_memory_bytes() > 0)
"""
    # -I -S: neither the installed packages nor the environment are seen.
    command = [sys.executable, "-I", "-S", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert found.stdout == "True\n", found.stderr
