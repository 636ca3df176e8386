"""What is shown of a storage's URL."""

from __future__ import annotations

from ...spaces.boundary.secrets import HARMLESS, masked


def shown_url(url: str) -> str:
    """A database's URL with all that may be a secret masked: its password, and options that are not known to be harmless.

    >>> shown_url("postgresql+psycopg://ann:s3cret@db/studies?api=x&sslmode=require")
    'postgresql+psycopg://ann:***@db/studies?api=***&sslmode=require'
    """
    from sqlalchemy.engine import URL, make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return _unparsed(url)
    host = parsed.host and parsed.host.rpartition("@")[2]  # an @ that is not percent-encoded ends no password
    hidden = {name: value if name.lower() in HARMLESS else "***" for name, value in parsed.query.items()}
    password = None if parsed.password is None else "***"
    shown = URL.create(
        parsed.drivername, parsed.username, password, host, parsed.port, parsed.database, hidden
    )
    if not parsed.password and "***" not in hidden.values() and host == parsed.host:
        return masked(url)  # as it was written; a user alone may be a token, of a web address
    return masked(shown.render_as_string().replace("=%2A%2A%2A", "=***"))


def _unparsed(url: str) -> str:
    """What is not a URL: nothing between its first colon or slash and its last @ is known to be harmless."""
    first, at, rest = " ".join(url.split()).rpartition("@")
    return masked(rest if not at else f"{first[: _credentials(first)]}***@{rest}")


def _credentials(text: str) -> int:
    return min(((text.find(mark) + len(mark)) for mark in ("://", "//", ":") if mark in text), default=0)
