"""A study may have a deadline: when that is, what gave it, and the plan until then."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("bsearch_study", sa.Column("deadline", sa.Text))
