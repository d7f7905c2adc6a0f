"""A PostgreSQL server of a test's own, from the programs of Debian's package `postgresql`."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUPERUSER = "postgres"
START_TIMEOUT_S = 60
FASTER = "-c fsync=off -c listen_addresses='' -c shared_buffers=16MB"


def find_program(name: str) -> str | None:
    """Return a program of the server; Debian keeps them out of PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return shutil.which(name, path=os.pathsep.join([*map(str, folders), os.environ["PATH"]]))


class Postgres:
    """A server that listens on a socket in its own folder."""

    def __init__(self, folder: Path, user: str | None) -> None:
        self._folder = folder
        self._user = user
        """Whom its processes run as; the server refuses root."""

    def url(self, role: str = SUPERUSER, database: str = "postgres") -> str:
        """Return SQLAlchemy's URL of a database."""
        return f"postgresql+psycopg://{role}@/{database}?host={self._folder}"

    def make(self) -> None:
        """Make the server's files."""
        self._run("initdb", "-U", SUPERUSER, "-A", "trust", "-N", "-D", self._data)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = f"{FASTER} -k {self._folder}"
        log = self._folder / "log"
        self._run("pg_ctl", "-D", self._data, "-w", "-l", log, "-o", options, "start")

    def stop(self) -> None:
        """Stop it, and end the connections there are."""
        self._run("pg_ctl", "-D", self._data, "-w", "-m", "immediate", "stop")

    def sql(self, text: str, database: str = "postgres") -> str:
        """Run statements as the superuser; return what psql prints."""
        place = ("-h", self._folder, "-U", SUPERUSER, "-d", database)
        return self._run("psql", *place, "-v", "ON_ERROR_STOP=1", "-Atqc", text)

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _run(self, program: str, *arguments: str | Path) -> str:
        found = find_program(program)
        assert found is not None, f"{program} is missing; install the package postgresql"
        done = subprocess.run(
            [found, *map(str, arguments)],
            user=self._user,
            cwd=self._folder,
            timeout=START_TIMEOUT_S,
            check=False,
            # A pipe would be inherited by the server, and never end.
            stdout=(output := tempfile.TemporaryFile()),  # noqa: SIM115
            stderr=subprocess.STDOUT,
        )
        with output:
            output.seek(0)
            text = output.read().decode()
        assert done.returncode == 0, text
        return text.strip()


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    """Run a server as this user; as nobody where this user is root, which it refuses."""
    with tempfile.TemporaryDirectory(prefix="agent-r1-pg-") as name:
        user = "nobody" if os.geteuid() == 0 else None
        if user is not None:
            os.chown(name, pwd.getpwnam(user).pw_uid, -1)
        server = Postgres(Path(name), user)
        server.make()
        server.start()
        try:
            yield server
        finally:
            server.stop()
