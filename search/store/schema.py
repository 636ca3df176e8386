"""Our tables, all named `bsearch_*`; Alembic migrates them. Optuna's in the same database are a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ...spaces.errors import NoStudyError, StorageError
from .url import shown_url

# Of our own: Optuna owns `alembic_version`, and a second head there breaks `optuna.load_study`.
VERSION_TABLE = "bsearch_alembic_version"
# The newest revision in `migrations/versions`; a test keeps the two in step, so that reading a database imports no Alembic.
HEAD = "0006"
# The last commit that migrates databases of revisions before the first in `migrations/versions`.
_READS_OLDER = "0d7e093"


class _Printed(sa.TypeDecorator[str]):
    """Text of errors: what no database can store in it, such as a file name that is not UTF-8, is escaped."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: object) -> str | None:
        return value and value.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


metadata = sa.MetaData()

versions = sa.Table(VERSION_TABLE, metadata, sa.Column("version_num", sa.String(32), primary_key=True))
studies = sa.Table(
    "bsearch_study",
    metadata,
    sa.Column("name", sa.String(120), primary_key=True),
    sa.Column("base_name", sa.String(120), nullable=False),  # as in the study file; `--new` adds -2, -3, ...
    sa.Column("identity", sa.Text, nullable=False),  # JSON of what must not change between runs
    sa.Column("spec", sa.Text, nullable=False),  # JSON of the study as it was last run
    sa.Column("created_at", sa.String(40), nullable=False),
    sa.Column("driver_s", sa.Float, nullable=False),  # driver time in seconds, summed over restarts
    sa.Column("holder", sa.String(200)),
    sa.Column("heartbeat_at", sa.Float),  # seconds since 1970, by the database's clock
    # JSON of the step-time laws that time its trials, by parameters that change cost.
    sa.Column("step_times", sa.Text),
    sa.Column("best_rates", sa.Text),  # JSON of the StoredRates fitted when it last ran
    sa.Column("deadline", sa.Text),  # JSON of the Deadline, where it has one
)
profiles = sa.Table(
    "bsearch_profile",
    metadata,
    sa.Column("key", sa.String(64), primary_key=True),  # hash of `about`
    sa.Column("about", sa.Text, nullable=False),  # JSON of task, parameters, precision, limits and device
    sa.Column("profile", sa.Text, nullable=False),  # JSON of the DeviceProfile
    sa.Column("measured_at", sa.String(40), nullable=False),
)
trials = sa.Table(
    "bsearch_trial",
    metadata,
    sa.Column("study", sa.String(120), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("outcome", sa.String(20), nullable=False),  # `running` until its first attempt has ended
    sa.Column("parameters", sa.Text, nullable=False),  # JSON, searched ones
    sa.Column("facts", sa.Text, nullable=False),  # JSON of the TrialFacts
    sa.Column("objectives", sa.Text),  # JSON of its values, in the order of `Objectives.names`
    sa.Column("violation", sa.Float, nullable=False),
    sa.Column("started_at", sa.String(40), nullable=False),  # UTC, as all times here
    sa.Column("ended_at", sa.String(40)),
)
attempts = sa.Table(
    "bsearch_attempt",
    metadata,
    sa.Column("study", sa.String(120), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("setup", sa.Text, nullable=False),
    sa.Column("started_at", sa.String(40), nullable=False),
    sa.Column("ended_at", sa.String(40)),
    sa.Column("outcome", sa.String(20)),
    sa.Column("message", _Printed),
    sa.Column("traceback", _Printed),
)
measurements = sa.Table(
    "bsearch_measurement",
    metadata,
    sa.Column("study", sa.String(120), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("samples_seen", sa.BigInteger, primary_key=True),
    sa.Column("elapsed_s", sa.Float, nullable=False),
    sa.Column("accuracy", sa.Float),
    sa.Column("train_loss", sa.Float),
    sa.Column("scores", sa.Text, nullable=False),
)


def revision_of(connection: Connection) -> str | None:
    """The revision of our tables in a database; None where there are none."""
    return (
        connection.execute(sa.select(versions)).scalar()
        if sa.inspect(connection).has_table(VERSION_TABLE)
        else None
    )


def known_revisions() -> frozenset[str]:
    """The revisions that this version of bsearch can read or migrate from."""
    return frozenset(path.name[1:5] for path in (_MIGRATIONS / "versions").glob("v[0-9][0-9][0-9][0-9]_*.py"))


def unknown_revision(revision: str | None) -> str:
    """Why tables of a revision can neither be read nor migrated, and what to do; empty where they can, or there are none."""
    if revision is None or revision in known_revisions():
        return ""
    if revision > HEAD:
        return f"a newer bsearch has written it (schema {revision}, known here up to {HEAD}). Use it, or another storage."
    return (
        f"an older bsearch has written it (schema {revision}, known here from {min(known_revisions())} on). Open it once with "
        f"commit {_READS_OLDER}, such as by its `bsearch show`, which brings it up to date; or use another storage."
    )


_MIGRATIONS = Path(__file__).parent / "migrations"


def migrate(
    url: str,
    engine: Engine,
    *,
    create: bool,
    may_change: Callable[[Connection], None] = lambda connection: None,
) -> None:
    """Bring our tables to this version.

    Args:
        create: create them if there are none.
        may_change: raises where tables of an earlier version may not be changed now.

    Raises:
        StorageError: there are none and none may be created, or a newer bsearch has written them, or a much older one.
    """
    with engine.connect() as connection:
        # In this order: another process may create both meanwhile, in one transaction.
        exists, revision = sa.inspect(connection).has_table(studies.name), revision_of(connection)
    if revision == HEAD:
        return
    shown = shown_url(url)
    if revision is None and exists:
        raise StorageError(
            f"storage {shown}: expected the version of its tables in {VERSION_TABLE}, which is empty. Restore the database "
            "from a copy, or name another storage."
        )
    if revision is None and not create:  # reading leaves a foreign database unchanged
        raise NoStudyError(
            f"storage {shown}: holds no study of bsearch's. `bsearch run` creates one; `bsearch ask optuna:URL` reads Optuna's."
        )
    if why := unknown_revision(revision):
        raise StorageError(f"storage {shown}: {why}")
    with _exclusive(engine) as connection:
        if (revision := revision_of(connection)) is None:
            metadata.create_all(connection)
            connection.execute(sa.insert(versions).values(version_num=HEAD))
        elif revision != HEAD:  # else another process was faster
            may_change(connection)
            _upgrade(connection)


def _upgrade(connection: Connection) -> None:
    # Alembic takes 0.2 s to import, and for most commands the tables are up to date.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))  # it interpolates
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


@contextmanager
def _exclusive(engine: Engine) -> Iterator[Connection]:
    """A transaction during which no other process changes the schema."""
    if engine.dialect.name != "sqlite":
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtext(VERSION_TABLE))))
            yield connection
        return
    # Python's sqlite3 begins no transaction for CREATE TABLE, so we do, and take the write lock at once.
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.exec_driver_sql("ROLLBACK")
            raise
        connection.exec_driver_sql("COMMIT")
