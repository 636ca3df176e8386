"""Run by Alembic with the connection that `schema.migrate` opened; the version table is ours, not Optuna's."""

from alembic import context
from bsearch.search.store.schema import VERSION_TABLE, metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, version_table=VERSION_TABLE)
with context.begin_transaction():
    context.run_migrations()
