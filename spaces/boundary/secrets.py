"""Secrets in text: passwords in URLs, and values that are named as secrets."""

from __future__ import annotations

import re

# Where a URL begins, or one that was mistyped or taken for a path, which has no two slashes.
_SCHEME = re.compile(
    r"(?<![\w+.-])(?:(?:[a-z][\w+.-]{0,40})?(?::/{1,2}|//)|(?:postgres|mysql|mariadb|mssql|oracle)[\w+]{0,20}[:/](?!/))",
    re.IGNORECASE,
)
# Of these a number after the host is a port (RFC 3986); of databases' URLs it may begin a password (SQLAlchemy's `make_url`).
_WEB = ("http://", "https://", "ws://", "wss://", "ray://", "tcp://", "grpc://")
_USER = re.compile(r"[^:/\s]*+")
_PORT = re.compile(r"\d{1,5}(?!\w)")
# A name with a value: `password=x`, `"api_key": "x"`, `password: x`, `--password x`. Each run of letters is read once, so that
# long texts take no longer.
_ASSIGNED = re.compile(
    r"""
    (?<![\w.-]) ((?P<option>--)?[\w.-]++)    # the name
    (['"]?\s?(?:=|%3D)\s? | ['"]\s?:\s? | :\s(?!expected\b) | (?(option)\s|(?!)))
    (
        \*\*\*(?![^\s&;,'"})\]])             # masked already
      | '(?:[^'\\\n]|\\.)*+' | "(?:[^"\\\n]|\\.)*+"
      | [^\s&;,'"]++
    )""",
    re.VERBOSE,
)
_SECRET = re.compile(
    r"pass(word|wd|phrase|code)|(^|[_.-])pass$|pwd|secret|credential|signature|odbc_connect|^(sig|key|token|authorization)$"
    r"|(api|access|account|private|auth|secret|shared|sas|bearer|hf|hub|github|wandb)[_.-]?(key|token(?!iz))",
    re.IGNORECASE,
)
# fmt: off
# Options of databases' drivers whose values are no secrets; any other may be one.
HARMLESS = frozenset({
    "application_name", "cache", "charset", "check_same_thread", "connect_timeout", "dbname", "driver", "encoding",
    "gssencmode", "host", "hostaddr", "immutable", "isolation_level", "keepalives", "keepalives_count", "keepalives_idle",
    "keepalives_interval", "mode", "nolock", "port", "read_timeout", "ssl_mode", "sslcert", "sslmode", "sslrootcert",
    "target_session_attrs", "tcp_user_timeout", "timeout", "unix_socket", "uri", "user", "vfs", "write_timeout",
})
# fmt: on
_AUTHORIZATION = re.compile(r"\b(authorization\W{1,4}\w{1,20}|bearer)\s[\w.~+/-]{8,}+=*", re.IGNORECASE)


def masked(text: str) -> str:
    """Text with the passwords of URLs in it, and values that are named as secrets, masked.

    It takes for a password whatever could be one. A text that is a URL is parsed instead: `shown_url` in search/store/url.py.

    >>> masked("cannot open postgresql://ann:s3cret@db/studies, api_key='x'")
    'cannot open postgresql://ann:***@db/studies, api_key=***'
    """
    lines = (_without_passwords(line) if "@" in line else line for line in text.split("\n"))
    return _AUTHORIZATION.sub(r"\1 ***", _ASSIGNED.sub(_masked_value, "\n".join(lines)))


def is_secret(name: str) -> bool:
    """Whether an option of this name may hold a secret."""
    return _SECRET.search(name) is not None


def _without_passwords(line: str) -> str:
    """A line without the credentials of its URLs: from the first colon to the last @, for a password may contain both."""
    last = line.rfind("@")
    shown, at = list[str](), 0
    for scheme in _SCHEME.finditer(line, 0, max(last, 0)):
        web = scheme[0].lower() in _WEB
        user = _USER.match(line, scheme.end())
        assert user is not None
        end = user.end()
        if web and "@" in user[0]:  # a token may stand for both
            shown += [line[at : scheme.end()], "***"]
            at = line.rfind("@", 0, end)
        elif line.startswith(":", end) and end < last and not (web and _PORT.match(line, end + 1)):
            shown += [line[at : end + 1], "***"]
            at = last
            break
    return "".join([*shown, line[at:]])


def _masked_value(found: re.Match[str]) -> str:
    # Before a colon a word such as `key` may begin a sentence.
    name = " " * found[3].startswith(":") + found[1].lstrip("-")
    of_url = found.string[found.start() - 1 : found.start()] in ("?", "&") and name.lower() not in HARMLESS
    return f"{found[1]}{found[3]}***" if of_url or is_secret(name) else found[0]
