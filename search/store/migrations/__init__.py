"""Alembic's environment for the `bsearch_*` tables."""
