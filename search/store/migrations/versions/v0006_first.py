"""The first revision that is migrated from. It makes nothing: a new database is created as `schema.py` describes it."""

revision = "0006"
down_revision = None
