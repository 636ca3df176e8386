"""JSON documents of our tables, changed row by row."""

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op


def rewrite(table: Any, key: tuple[str, ...], changes: dict[str, Callable[[dict[str, Any]], None]]) -> None:
    """Change the documents in these columns of every row.

    Args:
        key: columns that tell rows apart.
    """
    connection = op.get_bind()
    for row in connection.execute(sa.select(table)).mappings().all():
        values = {}
        for column, change in changes.items():
            if row[column]:
                document = json.loads(row[column])
                change(document)
                values[column] = json.dumps(document)
        if values:
            connection.execute(sa.update(table).where(*(table.c[name] == row[name] for name in key)).values(**values))


__all__ = ["rewrite"]
