"""TODO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection, Engine

from ...spaces.errors import LauncherError
from ...spaces.storage import masked

VERSION_TABLE = "bsearch_alembic_version"

metadata = sa.MetaData()

_studies = sa.Table(
    "bsearch_study",
    metadata,
    sa.Column("name", sa.String(120), primary_key=True),
    sa.Column("base_name", sa.String(120), nullable=False),  # as in the study file; `--new` adds -2, -3, ...
    sa.Column("identity", sa.Text, nullable=False),  # JSON of what may not change between runs
    sa.Column("spec", sa.Text, nullable=False),  # JSON of the study as it was last run
    sa.Column("created_at", sa.String(40), nullable=False),
    sa.Column("driver_s", sa.Float, nullable=False),  # seconds of driving, summed over restarts
    sa.Column("holder", sa.String(200)),
    sa.Column("heartbeat_at", sa.Float),  # seconds since 1970, by the database's clock
    sa.Column("prices", sa.Text),  # JSON of the step-time laws that price its trials, by parameters that change cost
)

_profiles = sa.Table(
    "bsearch_profile",
    metadata,
    sa.Column("key", sa.String(64), primary_key=True),  # hash of `about`
    sa.Column("about", sa.Text, nullable=False),  # JSON of task, parameters, precision, limits and device
    sa.Column("profile", sa.Text, nullable=False),  # JSON of the DeviceProfile
    sa.Column("measured_at", sa.String(40), nullable=False),
)

_attempts = sa.Table(
    "bsearch_attempt",
    metadata,
    sa.Column("study", sa.String(120), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),  # of the Optuna trial
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("setup", sa.Text, nullable=False),
    sa.Column("started_at", sa.String(40), nullable=False),
    sa.Column("ended_at", sa.String(40)),
    sa.Column("outcome", sa.String(20)),
    sa.Column("message", sa.Text),
    sa.Column("traceback", sa.Text),
    sa.Column("result", sa.Text),  # JSON of what Optuna is told
)

_measurements = sa.Table(
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


def _migrations(config: Config) -> ScriptDirectory:
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return ScriptDirectory.from_config(config)


def _migrate(engine: Engine, *, create: bool) -> None:
    config = Config()
    head = _migrations(config).get_current_head()

    def revision_of(connection: Connection) -> str | None:
        return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()

    with engine.connect() as connection:
        revision = revision_of(connection)
    if revision == head:
        return
    if revision is None and not create:  # whoever only reads leaves other people's databases as they are
        raise LauncherError(
            f"storage {masked(engine.url.render_as_string())}: holds no study of bsearch's. `bsearch run` begins one."
        )
    with _alone(engine) as connection:
        if revision_of(connection) != head:  # another process was faster
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


@contextmanager
def _alone(engine: Engine) -> Iterator[Connection]:
    """A transaction beside which no other process changes the schema."""
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
