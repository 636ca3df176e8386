"""A study keeps the step-time laws that price its trials, so that all of them are priced alike."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("bsearch_study", sa.Column("prices", sa.Text))
