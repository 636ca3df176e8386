"""A private PostgreSQL from Debian's package: its own folder, port and password, gone when the tests end."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PASSWORD = "s3cret-pa55"  # noqa: S105
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",  # we stop servers, never machines
    "max_connections": "100",
    "shared_buffers": "16MB",
    "logging_collector": "off",
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class PostgresServer:
    """One server; `stop` and `start` it as often as you like, its databases stay."""

    def __init__(self, folder: Path, programs: Path, user: str | None) -> None:
        self.folder, self._programs, self._user = folder, programs, user
        self.port = free_port()
        self._server: subprocess.Popen[bytes] | None = None
        self._databases = 0
        (folder / "password").write_text(PASSWORD)
        if user is not None:
            for path in (folder, folder / "password"):
                shutil.chown(path, user)
        initdb = [
            programs / "initdb",
            "--pgdata",
            folder / "data",
            "--username",
            "ann",
            "--auth",
            "scram-sha-256",
        ]
        initdb += ["--pwfile", folder / "password", "--encoding", "UTF8", "--no-locale", "--no-sync"]
        subprocess.run(initdb, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://ann:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """The URL of an empty database."""
        self._databases += 1
        self.sql(f"CREATE DATABASE study{self._databases}")
        return self.url(f"study{self._databases}")

    def sql(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        import psycopg

        where = self.url(database).replace("+psycopg", "")
        with psycopg.connect(where, autocommit=True, connect_timeout=20) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def states(self, url: str) -> Counter[str]:
        """How many trials there are with which outcome."""
        import psycopg

        try:
            return Counter(
                str(state)
                for (state,) in self.sql("SELECT outcome FROM bsearch_trial", url.rpartition("/")[2])
            )
        except psycopg.errors.UndefinedTable:
            return Counter()

    def start(self) -> None:
        settings = SETTINGS | {"port": str(self.port), "unix_socket_directories": str(self.folder)}
        command = ["setpriv", "--pdeathsig", "INT", self._programs / "postgres", "-D", self.folder / "data"]
        if self._user is not None:
            command[1:1] = [
                "--reuid",
                self._user,
                "--regid",
                str(pwd.getpwnam(self._user).pw_gid),
                "--clear-groups",
            ]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        import psycopg

        limit = time.monotonic() + 60
        while True:
            try:
                self.sql("SELECT 1")
                return
            except psycopg.OperationalError:
                assert self._server.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < limit, (self.folder / "log").read_text()
                time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: fast, connections are cut. SIGQUIT: immediately, as a crash."""
        assert self._server is not None
        self._server.send_signal(how)
        self._server.wait(timeout=60)

    @contextmanager
    def away(self, seconds: float) -> Iterator[None]:
        """The server crashes now and is back after some seconds, at the block's end."""
        self.stop(signal.SIGQUIT)
        until = time.monotonic() + seconds
        yield
        time.sleep(max(until - time.monotonic(), 0))
        self.start()


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A started server; skips the test where PostgreSQL or its driver is not installed."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install '.[postgres]'")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found or shutil.which("setpriv") is None:
        pytest.skip("no PostgreSQL server under /usr/lib/postgresql: apt-get install postgresql")
    user = None
    if os.geteuid() == 0:  # it refuses to run as root
        known = {one.pw_name for one in pwd.getpwall()}
        user = next((name for name in ("postgres", "nobody") if name in known), None)
        if user is None:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres or nobody")
    folder = Path(tempfile.mkdtemp(prefix="bsearch-pg-"))
    try:
        server = PostgresServer(folder, found[-1].parent, user)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
