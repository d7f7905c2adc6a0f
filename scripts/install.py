"""Make `.venv` of a checkout: installs exactly one lock of deploy/constraints, writes a stamp.

Called by scripts/setup with Python 3.11 or 3.12; standard library only. A second run finds the
stamp and ends at once; an interrupted run continues. A failure says what to do about it. Without
`--variant`, an environment keeps its variant, and a new one is for CPUs.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # nothing is installed yet

from services.setup import lock_install, native_libraries  # noqa: E402 - found through the line above
from services.setup.lock_install import InstallError, Target  # noqa: E402

LOCKS = REPOSITORY / "deploy" / "constraints"
VARIANTS = ("cpu", "gpu")
TEST_LOCKS = {
    "parity": REPOSITORY / "tests" / "parity" / "requirements.txt",
    "triton": REPOSITORY / "tests" / "runner_v2" / "requirements.txt",
}
"""What only tests need, by the folder of `.venv` that it goes to, apart from the environment."""
SCRIPTS = tuple(map(Path, (__file__, lock_install.__file__, native_libraries.__file__)))
VENV = REPOSITORY / ".venv"
STAMP = VENV / "agent-r1-setup.txt"
TESTS_STAMP = VENV / "agent-r1-tests.txt"


def variant_there(stamp: Path = STAMP) -> str | None:
    """Return the variant of a finished set-up; None without one."""
    if not stamp.exists():
        return None
    first = stamp.read_text().split(" ")[0]
    return first if first in VARIANTS else VARIANTS[0]  # older stamps name none


def compute_stamp(target: Target) -> str:
    """Return what a finished set-up depends on: lock, project file, interpreter and place."""
    digest = hashlib.sha256()
    for path in (target.lock, REPOSITORY / "pyproject.toml", *sorted(SCRIPTS)):
        digest.update(path.read_bytes())
    digest.update(f"{sys.version_info[:2]} {REPOSITORY}".encode())
    return f"{target.lock.stem} {digest.hexdigest()}"


def compute_tests_stamp(target: Target) -> str:
    """Return what a finished installation for tests depends on."""
    texts = "".join(lock.read_text() for lock in TEST_LOCKS.values())
    return f"{target.lock.stem} {hashlib.sha256(texts.encode()).hexdigest()}"


def is_done(stamp: str, target: Target, file: Path = STAMP) -> bool:
    """Tell whether the environment is what `stamp` says."""
    return target.python.exists() and file.exists() and file.read_text().strip() == stamp


def check_system(variant: str) -> None:
    """Run the check of system, Python, memory, disk and GPUs; it prints what it found."""
    preflight = str(REPOSITORY / "services" / "setup" / "preflight.py")
    check = subprocess.run([sys.executable, preflight, variant])
    if check.returncode != 0:
        sys.exit(check.returncode)


def make_venv(target: Target) -> None:
    """Create `.venv`, or keep the one that is there when its interpreter fits."""
    probe = "import sys; print('%d.%d' % sys.version_info[:2])"
    if target.python.exists():
        found = subprocess.run([str(target.python), "-c", probe], capture_output=True, text=True)
        wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
        has_pip = subprocess.run(
            [str(target.python), "-m", "pip", "--version"], capture_output=True
        )
        # Both variants have a `vllm`, under two names: they do not replace each other.
        same = variant_there() in (None, target.lock.stem)
        if same and found.stdout.strip() == wanted and has_pip.returncode == 0:
            return
    # This program may itself run from the environment that is replaced.
    base = getattr(sys, "_base_executable", sys.executable)
    print(f"creating {VENV.name} with {base}")
    try:
        subprocess.run([base, "-m", "venv", "--clear", str(VENV)], check=True)
    except subprocess.CalledProcessError as exc:
        raise InstallError(f"python -m venv ended with exit code {exc.returncode}") from exc


def install_all(target: Target) -> None:
    """Install the lock and this project into `.venv`."""
    make_venv(target)
    lock_install.install_lock(target)
    lock_install.run_pip(target, "installing agent-r1", ["--editable", "."], REPOSITORY)


def install_for_tests(target: Target) -> None:
    """Install what only tests need beside the environment."""
    for name, lock in TEST_LOCKS.items():
        if name == "triton" and target.lock.stem == "gpu":
            continue  # the environment has it, and runs it on a GPU
        arguments = ["--upgrade", "--target", str(VENV / name), "--requirement", str(lock)]
        lock_install.run_pip(target, f"installing {lock.parent.name} for tests", arguments)


def main() -> None:
    """Bring `.venv` to the state of the lock, or say why that is not possible."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--force", action="store_true", help="ignore the stamp")
    parser.add_argument(
        "--variant", choices=VARIANTS, help="default: the one that is there, or cpu"
    )
    parser.add_argument("--tests", action="store_true", help="install what only tests need as well")
    options = parser.parse_args()
    target = Target(VENV, LOCKS / f"{options.variant or variant_there() or VARIANTS[0]}.txt")
    jobs = [(STAMP, compute_stamp(target), install_all)]
    if options.tests:
        jobs.append((TESTS_STAMP, compute_tests_stamp(target), install_for_tests))

    def to_do() -> list[tuple[Path, str, Callable[[Target], None]]]:
        return [job for job in jobs if options.force or not is_done(job[1], target, job[0])]

    if not to_do():
        return
    check_system(target.lock.stem)
    started = time.monotonic()
    with (REPOSITORY / "pyproject.toml").open() as guard:
        # Two set-ups in one folder (two terminals) take turns; the second finds the work done.
        fcntl.flock(guard, fcntl.LOCK_EX)
        try:
            for file, stamp, install in to_do():
                install(target)
                file.write_text(stamp + "\n")
        except InstallError as exc:
            sys.exit(lock_install.explain(target, str(exc)))
        except native_libraries.MissingLibraryError as exc:
            sys.exit(f"\nset-up stopped: {exc}")
        except OSError as exc:
            sys.exit(lock_install.explain(target, f"{type(exc).__name__}: {exc}"))
        except KeyboardInterrupt:
            sys.exit("\nset-up interrupted; the same command continues where it stopped")
    print(f"set-up done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
