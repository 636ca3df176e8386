"""How the database is reached: its URL, an engine that many share, waiting while it is away, what its errors mean to people.

Optuna's engine is set up here as well, so that both keep to the same waits and the same words.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import sqlalchemy as sa
from alembic.util.exc import CommandError
from sqlalchemy.engine import URL, Engine, ExceptionContext, make_url

from ...spaces.errors import Fault, LauncherError, StudyFileError
from ...spaces.storage import masked, network_file_system

AWAY_LIMIT_S = 300.0  # how long a driver waits for a database that went away
BUSY_S = 30.0  # how long SQLite itself waits for another's write to end
MOUNTS = Path("/proc/mounts")

Given = ParamSpec("Given")
Came = TypeVar("Came")


class DatabaseAway(Exception):
    """The database cannot be reached now; what was asked of it was perhaps done, and perhaps not."""


class Patience:
    """Waits for a database that went away, for all who ask it, and says so once.

    One that never answered is more likely misnamed than away: then nothing is waited for.

    Args:
        url: of the storage.
        say: is told of a wait that lasts.
        limit_s: how long to wait; from then on every failure is final.
    """

    def __init__(self, url: str, say: Callable[[str], None] = lambda text: None, limit_s: float = 0.0) -> None:
        self.shown, self._say, self._limit_s = masked(url), say, limit_s
        self.over = False  # nobody waits any longer; set by a signal handler, so no threading.Event, whose lock it might hold
        self._answered = False
        self._away = False
        self._lock = threading.Lock()

    def __call__(self, call: Callable[[], Came]) -> Came:
        """What `call` gives, repeated until the database answers; so what it does twice must be as if done once.

        Raises:
            LauncherError: the database stayed away.
        """
        begun, wait_s = time.monotonic(), 0.1
        while True:
            try:
                came = call()
            except DatabaseAway as error:
                away_s = time.monotonic() - begun
                if self.over or not self._answered or away_s >= self._limit_s:
                    raise self._final(error, away_s) from error
                if wait_s > 1:  # a connection that was only cut is made anew before that
                    self._tell(True, f"the database does not answer ({error}); trying for up to {self._limit_s / 60:.2g} min")
                until = time.monotonic() + min(wait_s, self._limit_s - away_s)
                wait_s = min(2 * wait_s, 10.0)
                while not self.over and time.monotonic() < until:
                    time.sleep(0.05)
            else:
                self._answered = True
                self._tell(False, f"the database answers again, after {time.monotonic() - begun:.0f} s")
                return came

    def _tell(self, away: bool, text: str) -> None:
        with self._lock:
            changed, self._away = self._away != away, away
        if changed:
            self._say(text)

    def _final(self, error: DatabaseAway, away_s: float) -> LauncherError:
        if not self._answered:
            return LauncherError(f"storage {self.shown}: the database does not answer: {error}. Look whether it runs there.")
        self.over = True
        return LauncherError(
            f"storage {self.shown}: the database has not answered for {away_s:.0f} s: {error}. "
            "What was finished is kept: when it is back, the same command goes on from there."
        )


class _Patient(Protocol):
    @property
    def patience(self) -> Patience: ...


Self = TypeVar("Self", bound=_Patient)


def patient(method: Callable[Concatenate[Self, Given], Came]) -> Callable[Concatenate[Self, Given], Came]:
    """A method that is called again while its database is away: done twice, it is as done once."""

    @functools.wraps(method)
    def waits(self: Self, /, *args: Given.args, **kwargs: Given.kwargs) -> Came:
        return self.patience(lambda: method(self, *args, **kwargs))

    return cast(Callable[Concatenate[Self, Given], Came], waits)


def engine_options(url: str) -> dict[str, Any]:
    """How SQLAlchemy is to make an engine on the URL, for us and for Optuna.

    Raises:
        StudyFileError: it is no URL.
    """
    parsed = _parsed(url)
    options: dict[str, Any] = {"pool_pre_ping": True}
    if parsed.get_backend_name() == "sqlite":
        options["connect_args"] = {"timeout": BUSY_S}
    elif parsed.drivername in ("postgresql", "postgresql+psycopg", "postgresql+psycopg2"):
        # A server whose machine or network is gone says nothing: without these, TCP waits for hours.
        patience = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
        patience["tcp_user_timeout"] = 60_000
        options["connect_args"] = {name: value for name, value in patience.items() if name not in parsed.query}
    return options


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise _storage_fault(
            "expected an SQLAlchemy URL such as sqlite:///study.db or postgresql+psycopg://user@host/db", masked(url)
        ) from None
    if "@" in (parsed.host or ""):
        raise _storage_fault("expected a password with @ written as %40, / as %2F and : as %3A", masked(url))
    return parsed


def storage_engine(url: str, *, create: bool = True) -> Engine:
    """An engine on the storage, set up so that one writer and many readers get along.

    Args:
        create: make the folder of a SQLite file that is not there yet, which the first connection makes.

    Raises:
        LauncherError: there is no such file, and none is to be made.
        StudyFileError: the URL names no known database, its driver is not installed, or its folder cannot be written.
    """
    shown, parsed = masked(url), _parsed(url)
    try:
        engine = sa.create_engine(parsed, **engine_options(url))
        with warnings.catch_warnings():
            warnings.simplefilter("error", sa.exc.SAWarning)  # of a query that the driver does not know
            engine.dialect.create_connect_args(parsed)
    except sa.exc.NoSuchModuleError as error:
        raise _storage_fault(f"no such kind of database: {error}", shown) from None
    except (sa.exc.ArgumentError, sa.exc.SAWarning, ValueError, TypeError):
        raise _storage_fault(
            "expected an SQLAlchemy URL such as sqlite:///study.db or postgresql+psycopg://user@host/db", shown
        ) from None
    except ModuleNotFoundError as error:
        package = "'bsearch[postgres]'" if "psycopg" in str(error) else error.name
        hint = f" Install it: pip install {package}"
        raise _storage_fault(f"the database's driver {error.name!r} is not installed.{hint}", shown) from None
    if parsed.get_backend_name() == "sqlite":
        if not create and not os.path.isfile(parsed.database or ""):  # noqa: PTH113  # a name too long is no file
            raise LauncherError(f"storage {shown}: no such database yet. `bsearch run` makes it.")
        _check_folder(_folder(engine), shown)
    set_up(engine)
    return engine


def _storage_fault(message: str, shown: str) -> StudyFileError:
    return StudyFileError(Fault("storage", f"{message}; got {shown!r}"))


def _folder(engine: Engine) -> Path:
    return Path(engine.url.database or ".").parent


def set_up(engine: Engine) -> None:
    """Teach an engine what every storage of ours keeps to; it may be Optuna's own."""
    sa.event.listen(engine, "handle_error", _away)
    if engine.dialect.name == "sqlite":
        _tune_sqlite(engine, network_storage(engine) is not None)
    engine.dispose()  # what was opened before knows nothing of it
    weakref.finalize(engine, engine.pool.dispose)  # whoever forgets an engine has closed its connections


def network_storage(engine: Engine) -> str | None:
    """The type of the network file system that an SQLite file lies on; None elsewhere."""
    if engine.dialect.name != "sqlite" or engine.url.database in (None, "", ":memory:"):
        return None
    try:
        return network_file_system(MOUNTS.read_text(), _folder(engine).resolve())
    except OSError:  # not Linux
        return None


def _tune_sqlite(engine: Engine, network: bool) -> None:
    """WAL and fewer waits for the disk: five times faster asks, and readers never wait for the writer.

    Not on a network: WAL needs memory that all who open the file share, and a server may forget what it has not written.
    """

    def _pragmas(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={BUSY_S * 1000:.0f}")
        _wait_busy(lambda: cursor.execute(f"PRAGMA journal_mode={'DELETE' if network else 'WAL'}"))
        cursor.execute(f"PRAGMA synchronous={'FULL' if network else 'NORMAL'}")
        cursor.close()

    sa.event.listen(engine, "connect", _pragmas)


def _wait_busy(write: Callable[[], object]) -> None:
    """A change of the journal asks for a lock that SQLite does not wait for, where others open a new file at the same time."""
    until = time.monotonic() + BUSY_S
    while True:
        try:
            write()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= until:
                raise
            time.sleep(0.02)
        else:
            return


def _away(context: ExceptionContext) -> DatabaseAway | None:
    """Errors that say "not now" become one of ours at their birth: SQLAlchemy and Optuna pass it through untouched."""
    error = context.original_exception
    if context.is_pre_ping:
        return None  # the pool makes a new connection
    if isinstance(error, sqlite3.Error):
        away = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
    else:
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or ""
        # 08: connection exception. 57P: the server shuts down, has crashed, or starts.
        away = context.is_disconnect or state.startswith(("08", "57P"))
        # While connecting, libpq tells no state.
        away = away or (context.connection is None and isinstance(context.sqlalchemy_exception, sa.exc.OperationalError))
    return DatabaseAway(words_of(error)) if away else None


def words_of(error: BaseException) -> str:
    """An error's first line, which is what people need of it."""
    return masked(next(iter(str(error).strip().splitlines()), type(error).__name__)).rstrip(".")


def refused(url: str, error: BaseException) -> LauncherError:
    """What a user reads of an error that waiting does not mend."""
    cause = getattr(error, "orig", None) or error
    full = getattr(cause, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL or getattr(cause, "sqlstate", "") == "53100"
    if full:
        advice = "Make room on its disk: what was finished is kept, and the same command goes on from there."
    else:
        advice = "Look whether it is there, can be written, and has room."
    return LauncherError(f"storage {masked(url)}: the database refused: {words_of(cause)}. {advice}")


@contextmanager
def database_door(url: str) -> Iterator[None]:
    """SQLAlchemy's errors stop here; that the database is away passes on, to whoever has patience."""
    try:
        yield
    except CommandError as error:
        raise LauncherError(
            f"storage {masked(url)}: a newer bsearch has written it ({error}). Use that version or another storage."
        ) from None
    except sa.exc.IntegrityError:
        raise  # another was faster: `_put` knows what to do
    except sa.exc.DBAPIError as error:
        raise refused(url, error) from error


def made_once(make: Callable[[], Came]) -> Came:
    """What `make` gives, which creates tables where they are missing: another process may be creating the same ones now."""
    for wait_s in (0.1, 0.2, 0.4, 0.8, 1.6):
        try:
            return make()
        except sa.exc.DBAPIError as error:
            if not isinstance(error, sa.exc.IntegrityError) and "already exists" not in str(error):
                raise
        time.sleep(wait_s)
    return make()


def _check_folder(folder: Path, shown: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except (OSError, ValueError) as error:  # a NUL in the name
        raise _storage_fault(
            f"expected a folder that can be written, but {folder}: {getattr(error, 'strerror', error)}. "
            "Name another with storage: or BSEARCH_STORAGE",
            shown,
        ) from None
