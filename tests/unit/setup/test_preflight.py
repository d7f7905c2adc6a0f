"""The check of a machine before anything is installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1.setup import preflight


def test_this_machine_is_described_line_by_line():
    findings = preflight.check_machine(installed=False)
    names = [finding.name for finding in findings]
    assert names == ["system", "C library", "Python", "memory", "disk"]
    assert findings[0].ok
    assert findings[2].ok


@pytest.mark.parametrize(
    ("system", "machine", "text"),
    [("Darwin", "arm64", "macOS"), ("Windows", "AMD64", "Windows"), ("Linux", "aarch64", "x86-64")],
)
def test_systems_without_wheels_are_sent_to_docker(system: str, machine: str, text: str):
    finding = preflight.check_system(system, machine)
    assert not finding.ok
    assert text in finding.remedy
    assert "deploy/compose.cpu.yml up" in finding.remedy


@pytest.mark.parametrize(
    ("name", "version", "ok"),
    [("glibc", "2.28", True), ("glibc", "2.41", True), ("glibc", "2.17", False), ("", "", False)],
)
def test_an_old_or_other_c_library_is_refused(name: str, version: str, ok: bool):
    assert preflight.check_libc(name, version).ok is ok


@pytest.mark.parametrize(
    ("version", "ok"), [((3, 11), True), ((3, 12), True), ((3, 10), False), ((3, 13), False)]
)
def test_other_pythons_are_refused_with_the_remedy(version: tuple[int, int], ok: bool):
    finding = preflight.check_python(version)
    assert finding.ok is ok
    assert ok or "PYTHON=/path/to/python3.11 make setup" in finding.remedy


def test_too_little_memory_is_refused_and_unknown_memory_is_not():
    assert not preflight.check_memory(int(3.9e9)).ok
    assert preflight.check_memory(int(4.1e9)).ok
    assert preflight.check_memory(None).ok


def test_an_installed_environment_needs_less_disk():
    place = Path("/somewhere")
    one_gb = int(1e9)
    assert not preflight.check_disk(one_gb, False, place).ok
    assert preflight.check_disk(one_gb, True, place).ok


def test_what_will_be_downloaded_is_said_only_before_an_installation():
    findings = [preflight.Finding("system", "Linux")]
    assert "downloads about" in preflight.report(findings, installed=False)
    assert "downloads about" not in preflight.report(findings, installed=True)
    missing = [preflight.Finding("disk", "full", "free some")]
    assert preflight.report(missing, installed=False) == "MISSING  disk       full\n" + (
        " " * 9 + "free some"
    )


def test_each_variant_says_its_own_sizes_and_what_its_gpus_lack(monkeypatch: pytest.MonkeyPatch):
    place, ten_gb = Path("/somewhere"), int(10e9)
    assert preflight.check_disk(ten_gb, False, place, "cpu").ok
    # 4.3 GB of downloads, 10.3 GB installed, 0.5 GB for runs
    assert "15.1 GB are needed" in preflight.check_disk(ten_gb, False, place, "gpu").remedy
    assert "takes 10.3 GB in .venv" in preflight.report([], False, "gpu")
    old = preflight.Finding("driver", "535.1 is older than 580, which CUDA 13 needs", "install it")
    monkeypatch.setattr(preflight, "check_gpu_needs", lambda: [old])
    findings = preflight.check_machine(installed=False, variant="gpu")
    assert findings[-1] is old
    assert "MISSING  driver     535.1 is older" in preflight.report(findings, False, "gpu")
    assert old not in preflight.check_machine(installed=False)


def test_a_machine_without_a_driver_may_be_prepared_for_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight, "check_gpu_needs", list)
    (finding,) = preflight.check_gpus()
    assert finding.ok
    assert "nothing of it is checked" in finding.text


def test_it_needs_nothing_that_is_not_installed_yet():
    ast.parse(Path(preflight.__file__).read_text(), feature_version=(3, 7))
    # -I -S: neither the installed packages nor the environment are seen.
    command = [sys.executable, "-I", "-S", preflight.__file__]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stderr == ""
    names = ["system", "C library", "Python", "memory", "disk"]
    findings = [line[9:20].rstrip() for line in found.stdout.splitlines() if line[0] != " "]
    assert findings[: len(names)] == names
