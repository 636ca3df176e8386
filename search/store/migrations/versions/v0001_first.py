"""The first tables: studies, attempts at trials, and the measurements of each attempt."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "bsearch_study",
        sa.Column("name", sa.String(120), primary_key=True),
        sa.Column("base_name", sa.String(120), nullable=False),
        sa.Column("identity", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("created_at", sa.String(40), nullable=False),
        sa.Column("driver_s", sa.Float, nullable=False),
        sa.Column("holder", sa.String(200)),
        sa.Column("heartbeat_at", sa.Float),
    )
    op.create_table(
        "bsearch_profile",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("about", sa.Text, nullable=False),
        sa.Column("profile", sa.Text, nullable=False),
        sa.Column("measured_at", sa.String(40), nullable=False),
    )
    op.create_table(
        "bsearch_attempt",
        sa.Column("study", sa.String(120), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True),
        sa.Column("setup", sa.Text, nullable=False),
        sa.Column("started_at", sa.String(40), nullable=False),
        sa.Column("ended_at", sa.String(40)),
        sa.Column("outcome", sa.String(20)),
        sa.Column("message", sa.Text),
        sa.Column("traceback", sa.Text),
        sa.Column("result", sa.Text),
    )
    op.create_table(
        "bsearch_measurement",
        sa.Column("study", sa.String(120), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True),
        sa.Column("samples_seen", sa.BigInteger, primary_key=True),
        sa.Column("elapsed_s", sa.Float, nullable=False),
        sa.Column("accuracy", sa.Float),
        sa.Column("train_loss", sa.Float),
        sa.Column("scores", sa.Text, nullable=False),
    )


def downgrade() -> None:
    for table in ("bsearch_measurement", "bsearch_attempt", "bsearch_profile", "bsearch_study"):
        op.drop_table(table)
