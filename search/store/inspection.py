"""The state of a database, read without changing it; `bsearch check --machine` reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from .database import DatabaseUnavailable, RetryPolicy, first_line, network_storage, storage_engine, translate_errors
from .lock import Driver
from .schema import revision_of, unknown_revision
from .tables import Tables


@dataclass(frozen=True, slots=True)
class StorageReport:
    """The state of a database.

    Args:
        revision: of bsearch's tables there; None where there are none yet.
        unknown: why this version can neither read them nor bring them up to date, and what to do; empty where it can.
        network: the type of the network file system that an SQLite file is on.
        refusal: why it cannot be written; empty where it can.
        drivers: who runs which study.
    """

    revision: str | None
    unknown: str
    network: str | None
    refusal: str
    drivers: Mapping[str, Driver]


def inspect_storage(url: str) -> StorageReport:
    """Open a database that exists, and check whether it could be written; nothing in it changes.

    Raises:
        StorageError: it cannot be opened.
        StudyFileError: the URL names no database.
    """
    engine = storage_engine(url, create=False)

    def inspect() -> StorageReport:
        with translate_errors(url), engine.connect() as connection:
            revision = revision_of(connection)
        unknown = unknown_revision(revision)
        drivers: dict[str, Driver] = {}
        if revision is not None and not unknown:
            tables = Tables(url, create=False)
            found = {study.name: tables.lock.driver(study.name) for study in tables.studies()}
            drivers = {name: driver for name, driver in found.items() if driver is not None}
            tables.close()
        return StorageReport(revision, unknown, network_storage(engine), _refusal(engine), drivers)

    try:
        return RetryPolicy(url)(inspect)
    finally:
        engine.dispose()


def _refusal(engine: Engine) -> str:
    """Why a database cannot be written; empty where it can."""
    if engine.dialect.name == "postgresql":
        may_write = "current_setting('transaction_read_only') = 'off' AND NOT pg_is_in_recovery()"
        with engine.connect() as connection:
            query = f"SELECT {may_write}, has_schema_privilege(current_schema(), 'CREATE')"
            writes, may_create = connection.exec_driver_sql(query).one()
        if not writes:
            return "the server is read-only (a standby, or default_transaction_read_only)"
        return "" if may_create else "its user may not create tables in this schema"
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            if engine.dialect.name == "sqlite":
                connection.exec_driver_sql("PRAGMA busy_timeout=2000")
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                connection.exec_driver_sql("ROLLBACK")
    except (sa.exc.DBAPIError, DatabaseUnavailable) as error:
        return first_line(getattr(error, "orig", None) or error)
    return ""
