"""Connecting to the database: the engine, retries while it is unavailable, and its errors as messages people can act on.

Optuna's engine is configured here as well, so that both use the same timeouts and the same messages.
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
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, ExceptionContext, make_url

from ...spaces.boundary.secrets import masked
from ...spaces.boundary.storage import network_file_system, sqlite_parts
from ...spaces.errors import Fault, NoStudyError, StorageError, StudyFileError
from .url import shown_url

UNAVAILABLE_LIMIT_S = 300.0  # how long a driver waits for a database that has become unavailable
# How long SQLite itself waits for another's write to end; then it is said who has locked the file.
BUSY_S = 10.0
_LOCKED_S = 30.0  # how long every command waits for that
MOUNTS = Path("/proc/mounts")
# Pages of 4 KiB in SQLite's write-ahead log after which they go into the database: those of a few trials. A trial's writes took
# 8.9 instead of 8.1 ms with it on ext4, and 15 ms with 16 pages.
_LOG_PAGES = 64

P = ParamSpec("P")
T = TypeVar("T")


class DatabaseUnavailable(Exception):
    """The database cannot be reached now; the last statement may or may not have been executed.

    Args:
        locked: somebody else is writing, so it is there.
    """

    def __init__(self, message: str, *, locked: bool = False) -> None:
        super().__init__(message)
        self.locked = locked


class RetryPolicy:
    """Retries calls while the database is unavailable, on behalf of every caller, and reports a lasting outage once.

    A database that has never answered is more likely misnamed than down: then nothing is retried.

    Args:
        url: of the storage.
        notify: gets a message when an outage lasts, and when it ends.
        limit_s: how long to retry; from then on every failure is final.
    """

    def __init__(
        self, url: str, notify: Callable[[str], None] = lambda text: None, limit_s: float = 0.0
    ) -> None:
        self.shown, self._notify, self._limit_s = shown_url(url), notify, limit_s
        self.cancelled = False  # no more retries; set by a signal handler, so not a threading.Event, whose lock it might hold
        self._answered = False
        self._since_s: float | None = None  # an outage lasts since then
        self._lock = threading.Lock()

    def __call__(self, call: Callable[[], T]) -> T:
        """The result of `call`, retried until the database answers, so `call` must be idempotent.

        Raises:
            StorageError: the database stayed unavailable.
        """
        started_s, wait_s = time.monotonic(), 0.1
        while True:
            try:
                result = call()
            except DatabaseUnavailable as error:
                down_s = time.monotonic() - started_s
                limit_s = max(self._limit_s, _LOCKED_S) if error.locked else self._limit_s
                if self.cancelled or not (self._answered or error.locked) or down_s >= limit_s:
                    raise self._final(error, down_s) from error
                if wait_s > 1 or error.locked:  # a dropped connection is reopened before that
                    text = (
                        f"the database does not answer ({error}); retrying for up to {limit_s / 60:.2g} min"
                    )
                    self._report(text, started_s)
                until = time.monotonic() + min(wait_s, limit_s - down_s)
                wait_s = min(2 * wait_s, 10.0)
                while not self.cancelled and time.monotonic() < until:
                    time.sleep(0.05)
            else:
                self._answered = True
                self._report("", started_s)
                return result

    def _report(self, outage: str, began_s: float) -> None:
        """Say that an outage lasts, once, or that it has ended."""
        with self._lock:
            before_s, self._since_s = self._since_s, (self._since_s or began_s) if outage else None
        if outage and before_s is None:
            self._notify(outage)
        elif before_s is not None and not outage:
            self._notify(f"the database answers again, after {time.monotonic() - before_s:.0f} s")

    def _final(self, error: DatabaseUnavailable, down_s: float) -> StorageError:
        if not self._answered:
            return StorageError(
                f"storage {self.shown}: the database does not answer: {error}. Check that it is running there."
            )
        self.cancelled = True
        return StorageError(
            f"storage {self.shown}: the database has not answered for {down_s:.0f} s: {error}. "
            "Finished trials are saved: once it is back, the same command resumes the study."
        )


class _HasRetryPolicy(Protocol):
    @property
    def retry_policy(self) -> RetryPolicy: ...


Self = TypeVar("Self", bound=_HasRetryPolicy)


def retrying(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
    """A method that is called again while its database is unavailable; it must be idempotent."""

    @functools.wraps(method)
    def retry(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.retry_policy(lambda: method(self, *args, **kwargs))

    return cast(Callable[Concatenate[Self, P], T], retry)


def engine_options(url: str, *, create: bool = True) -> dict[str, Any]:
    """Options for `sqlalchemy.create_engine`, for our engine and for Optuna's.

    Args:
        create: a connection may create an SQLite file, which may have been deleted while it was open.

    Raises:
        StudyFileError: it is not a URL.
    """
    parsed = _parsed(url)
    options: dict[str, Any] = {"pool_pre_ping": True}
    if parsed.get_backend_name() == "sqlite":
        options["connect_args"] = {"timeout": BUSY_S}
        if not create and parsed.database and not parsed.query:
            options["creator"] = partial(_opened, parsed.database, "mode=rw")
    elif parsed.drivername in ("postgresql", "postgresql+psycopg", "postgresql+psycopg2"):
        # A server whose machine or network is gone sends nothing: without these, TCP waits for hours.
        timeouts = {
            "connect_timeout": 10,
            "keepalives_idle": 30,
            "keepalives_interval": 10,
            "keepalives_count": 3,
        }
        timeouts["tcp_user_timeout"] = 60_000
        options["connect_args"] = {
            name: value for name, value in timeouts.items() if name not in parsed.query
        }
    return options


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise _storage_fault(
            "expected an SQLAlchemy URL such as sqlite:///study.db or postgresql+psycopg://user@host/db",
            shown_url(url),
        ) from None
    if "@" in (parsed.host or ""):
        raise _storage_fault(
            "expected a password with @ written as %40, / as %2F and : as %3A", shown_url(url)
        )
    parts = sqlite_parts(url)
    return parsed if parts is None else parsed.set(database=parts[0])


def storage_engine(url: str, *, create: bool = True) -> Engine:
    """An engine on the storage, configured for one writer beside many readers.

    Args:
        create: create the folder of an SQLite file that does not exist yet; the first connection creates the file.

    Raises:
        StorageError: there is no such file, and none may be created.
        StudyFileError: the URL names no known database, its driver is not installed, or its folder cannot be written.
    """
    shown, parsed = shown_url(url), _parsed(url)
    try:
        engine = sa.create_engine(parsed, **engine_options(url))
        with warnings.catch_warnings():
            warnings.simplefilter("error", sa.exc.SAWarning)  # of a query that the driver does not know
            engine.dialect.create_connect_args(parsed)
    except sa.exc.NoSuchModuleError as error:
        raise _storage_fault(f"no such kind of database: {error}", shown) from None
    except (sa.exc.ArgumentError, sa.exc.SAWarning, ValueError, TypeError):
        raise _storage_fault(
            "expected an SQLAlchemy URL such as sqlite:///study.db or postgresql+psycopg://user@host/db",
            shown,
        ) from None
    except ModuleNotFoundError as error:
        package = "'psycopg[binary]'" if "psycopg" in str(error) else error.name
        hint = f" Install it: pip install {package}"
        raise _storage_fault(f"the database's driver {error.name!r} is not installed.{hint}", shown) from None
    if parsed.get_backend_name() == "sqlite":
        if not create and not os.path.isfile(parsed.database or ""):  # noqa: PTH113  # a name too long is no file
            raise NoStudyError(f"storage {shown}: no such database yet. `bsearch run` creates it.")
        if create:
            _check_folder(_folder(engine), shown)
        elif not parsed.query and not (
            os.access(_folder(engine), os.W_OK) and os.access(str(parsed.database), os.W_OK)
        ):
            return _read_only_engine(str(parsed.database), shown)
    configure_engine(engine, create=create)
    return engine


def _opened(file: str, query: str) -> sqlite3.Connection:
    """A connection to an SQLite file, whose name need not be text, by SQLite's own URI."""
    uri = f"file:{quote(os.fsencode(file))}?{query}"
    return sqlite3.connect(uri, timeout=BUSY_S, uri=True, check_same_thread=False)


def has_table(file: str, name: str) -> bool:
    """Whether an SQLite file has a table, by a new connection that changes nothing; true also if that is unknown."""
    try:
        with closing(_opened(file, "mode=ro")) as connection:
            found = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    except sqlite3.Error:
        return True
    return found is not None


def _read_only_engine(file: str, shown: str) -> Engine:
    """An engine on an SQLite file that this user may not write, such as a colleague's."""

    def connect() -> sqlite3.Connection:
        connection = _opened(file, "mode=ro")
        try:
            connection.execute("SELECT name FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as error:
            connection.close()
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            # Its writer has ended, and to read its write-ahead log SQLite would have to create a file beside it.
            log = Path(f"{file}-wal")
            if log.exists() and log.stat().st_size:
                raise StorageError(
                    f"storage {shown}: its folder is read-only, and {log.name} holds trials that can only be read where files "
                    f"can be written. Copy {Path(file).name} and {log.name} to a folder of yours, and name the copy."
                ) from None
            return _opened(file, "mode=ro&immutable=1")
        return connection

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.NullPool)
    engine.url = engine.url.set(database=file)
    sa.event.listen(engine, "handle_error", _as_unavailable)
    sa.event.listen(engine, "connect", _lenient_text)
    return engine


def _lenient_text(connection: Any, _record: object) -> None:
    """Bytes that are no text, which others may have written, must not end a query for all rows."""
    connection.text_factory = lambda raw: raw.decode(errors="replace")


def _storage_fault(message: str, shown: str) -> StudyFileError:
    return StudyFileError(Fault("storage", f"{message}; got {shown!r}"))


def _folder(engine: Engine) -> Path:
    return Path(engine.url.database or ".").parent


def configure_engine(engine: Engine, *, create: bool = True) -> None:
    """Install our error handling and SQLite settings on an engine; it may be Optuna's own.

    Args:
        create: it may create the database, and its journal; else both stay as they are.
    """
    sa.event.listen(engine, "handle_error", _as_unavailable)
    if engine.dialect.name == "sqlite":
        _tune_sqlite(engine, network_storage(engine) is not None, create)
    # An engine that is garbage-collected closes its connections; being disposed of gives it another pool.
    sa.event.listen(engine, "engine_disposed", lambda engine: weakref.finalize(engine, engine.pool.dispose))
    engine.dispose()  # connections opened before lack these settings


def network_storage(engine: Engine) -> str | None:
    """The type of the network file system that an SQLite file is on; None elsewhere."""
    if engine.dialect.name != "sqlite" or engine.url.database in (None, "", ":memory:"):
        return None
    try:
        return network_file_system(MOUNTS.read_text(), _folder(engine).resolve())
    except OSError:  # not Linux
        return None


def _tune_sqlite(engine: Engine, network: bool, create: bool) -> None:
    """WAL and fewer fsyncs: asks are five times faster, and readers never wait for the writer.

    The log goes into the database every few trials, not after SQLite's 4 MB, which are a whole study: a copy of the file
    without the log, or a log that is lost, then costs the latest trials alone.

    Not on a network file system: WAL needs memory shared by all who open the file, and a server may lose unsynced writes.
    """

    def _pragmas(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={BUSY_S * 1000:.0f}")
        if create:
            _retry_while_busy(lambda: cursor.execute(f"PRAGMA journal_mode={'DELETE' if network else 'WAL'}"))
        cursor.execute(f"PRAGMA synchronous={'FULL' if network else 'NORMAL'}")
        cursor.execute(f"PRAGMA wal_autocheckpoint={_LOG_PAGES}")
        cursor.close()

    sa.event.listen(engine, "connect", _pragmas)
    sa.event.listen(engine, "connect", _lenient_text)


def _retry_while_busy(write: Callable[[], object]) -> None:
    """Changing the journal mode takes a lock that SQLite does not wait for while others open a new file."""
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


def _as_unavailable(context: ExceptionContext) -> DatabaseUnavailable | None:
    """Transient errors become `DatabaseUnavailable` where they are raised: SQLAlchemy and Optuna pass it through untouched."""
    error = context.original_exception
    if context.is_pre_ping:
        return None  # the pool opens a new connection
    if isinstance(error, sqlite3.Error):
        transient = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
    else:
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or ""
        # 08: connection exception. 57P: the server shuts down, has crashed, or starts.
        transient = context.is_disconnect or state.startswith(("08", "57P"))
        # While connecting, libpq gives no state.
        transient = transient or (
            context.connection is None and isinstance(context.sqlalchemy_exception, sa.exc.OperationalError)
        )
    if not transient:
        return None
    by = _locked_by(context.engine) if isinstance(error, sqlite3.Error) else ""
    return DatabaseUnavailable(first_line(error) + by, locked=isinstance(error, sqlite3.Error))


def _locked_by(engine: Engine | None) -> str:
    """Who has locked an SQLite file, as Linux tells it; empty where it does not."""
    try:
        file = os.stat((engine and engine.url.database) or "")
        held = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return ""
    others = {words[4] for words in held if len(words) > 5 and words[5].endswith(f":{file.st_ino}")} - {
        str(os.getpid()),
        "0",
    }
    return f" by process {', '.join(sorted(others))}" if others else ""


def first_line(error: BaseException) -> str:
    """An error's first line, without passwords."""
    return masked(next(iter(str(error).strip().splitlines()), type(error).__name__)).rstrip(".")


def storage_refused(url: str, error: BaseException) -> StorageError:
    """The user's message for an error that retrying does not cure."""
    cause = getattr(error, "orig", None) or error
    full = (
        getattr(cause, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
        or getattr(cause, "sqlstate", "") == "53100"
    )
    code, words = getattr(cause, "sqlite_errorcode", 0) & 0xFF, str(cause)
    if full:
        advice = "Free space on its disk: finished trials are saved, and the same command resumes the study."
    elif code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        advice = (
            "Name another file, restore this one from a copy, or save what can be read: sqlite3 FILE .recover"
        )
    elif code == sqlite3.SQLITE_READONLY:
        advice = "It is read-only here: copy it to a folder of yours, and name the copy."
    elif (
        "no such table" in words
        or "no such column" in words
        or getattr(cause, "sqlstate", "") in ("42P01", "42703")
    ):
        advice = "A part of bsearch's tables is missing: restore the database from a copy, or name another storage."
    else:
        advice = "Check that it exists, is writable, and has free space."
    return StorageError(f"storage {shown_url(url)}: the database refused: {first_line(cause)}. {advice}")


@contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """SQLAlchemy's errors stop here; `DatabaseUnavailable` passes on to the retry policy."""
    try:
        yield
    except sa.exc.IntegrityError:
        raise  # another process was faster: `_upsert` handles it
    except sa.exc.DBAPIError as error:
        raise storage_refused(url, error) from error


@contextmanager
def transaction(url: str, engine: Engine) -> Iterator[Connection]:
    """A transaction on an engine, its errors translated."""
    with translate_errors(url), engine.begin() as connection:
        yield connection


def create_once(make: Callable[[], T]) -> T:
    """The result of `make`, which creates missing tables: another process may be creating the same ones now."""
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
            f"expected a writable folder, but {folder}: {getattr(error, 'strerror', error)}. "
            "Name another under storage: or in BSEARCH_STORAGE",
            shown,
        ) from None
