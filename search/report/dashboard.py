"""optuna-dashboard for this machine only, on the copy of a study in its database.

It has no login, so it is served on the loopback interface, to pages of its own, and refuses to change anything but notes.
"""

from __future__ import annotations

import http
import io
import ipaddress
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from ...spaces.boundary.secrets import masked
from ...spaces.errors import OutputError, StudyFileError, plain
from ..store.stored import StoredStudy
from ..suggest.optuna.database import open_storage
from .optuna_view import copy_now

HOST = "127.0.0.1"
_NOTE = re.compile(r"/api/studies/\d+(/\d+)?/note")
_SAFE = [("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-store")]
# No other page may show this one in a frame, and catch clicks meant for something else.
_UNFRAMED = [("Content-Security-Policy", "frame-ancestors 'none'"), ("X-Frame-Options", "DENY")]

_App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def guarded(app: _App) -> _App:
    """A WSGI application that answers only requests from its own pages, changes nothing but notes, and fails in words."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        def said(status: http.HTTPStatus, reason: str) -> Iterable[bytes]:
            body = json.dumps({"reason": reason}).encode()
            headers = [
                ("Content-Type", "application/json"),
                *_SAFE,
                *_UNFRAMED,
                ("Content-Length", str(len(body))),
            ]
            start_response(f"{status.value} {status.phrase}", headers)
            return [body]

        refusal = _refused(environ, environ.get("PATH_INFO", ""), environ.get("REQUEST_METHOD", "GET"))
        if refusal is not None:
            return said(http.HTTPStatus.FORBIDDEN, refusal)
        begun: list[tuple[str, list[tuple[str, str]]]] = []
        try:
            # Bottle writes tracebacks to this stream.
            with closing(io.StringIO()) as environ["wsgi.errors"]:
                body = app(environ, lambda status, headers, *error: begun.append((status, headers)))
        except Exception as error:
            return said(http.HTTPStatus.INTERNAL_SERVER_ERROR, _failure(error))
        status, headers = begun[-1]
        if status.startswith("5"):
            return said(http.HTTPStatus.INTERNAL_SERVER_ERROR, _failure(status))
        start_response(status, [*headers, *_UNFRAMED])
        return body

    return answer


def _failure(error: object) -> str:
    return (
        f"optuna-dashboard could not answer ({plain(masked(str(error)))}). The study is not affected: `bsearch show` and "
        "`bsearch report` read it without its copy for Optuna"
    )


def _refused(environ: Mapping[str, Any], path: str, method: str) -> str | None:
    """Why a request is refused; None if it is allowed.

    A page of another site may send requests here: through a host name of its own that resolves to this machine (it is then in
    Host), or as a cross-site request (its address is then in Origin).
    """
    host = environ.get("HTTP_HOST", "")
    if not _this_machine(host):
        return "this dashboard is only served at 127.0.0.1 and localhost; see docs/dashboard.md for access from elsewhere"
    if method in ("GET", "HEAD"):
        return None
    origin = environ.get("HTTP_ORIGIN")
    if origin is not None and urlsplit(origin).netloc != host:
        return "requests from other sites are refused"
    if method == "PUT" and _NOTE.fullmatch(path):
        return None
    return (
        "only notes can be written here: this is a copy, and changes of it would change nothing in the study"
    )


def _this_machine(host: str) -> bool:
    """Whether a Host header is a loopback name or address of this machine.

    >>> [_this_machine(host) for host in ("127.0.0.1:8080", "localhost", "[::1]:80", "evil.example:80", "127.0.0.1.evil")]
    [True, True, True, False, False]
    """
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    if name == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(name or "").is_loopback
    return False


class _Server(ThreadingMixIn, WSGIServer):
    """One thread per request, so that a slow plot does not block other pages."""

    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """Do not log requests."""


@contextmanager
def dashboard_server(stored: StoredStudy, port: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """A dashboard that listens on the loopback interface only, once the study's copy is up to date.

    Args:
        port: 0 selects any free port.

    Yields:
        The address of the study's page, and a function that serves it until interrupted.

    Raises:
        StudyFileError: optuna-dashboard is not installed.
        StorageError: the copy cannot be written.
        OutputError: the port is taken or not allowed.
    """
    try:
        from optuna_dashboard import wsgi
    except ImportError:
        raise StudyFileError(
            "optuna-dashboard is not installed. Install it: pip install optuna-dashboard"
        ) from None
    # It logs failures with their tracebacks; its responses name them.
    logging.getLogger("optuna_dashboard").setLevel(logging.CRITICAL)
    view = copy_now(stored)
    try:
        server = make_server(
            HOST, port, guarded(wsgi(open_storage(stored.url))), server_class=_Server, handler_class=_Quiet
        )
    except OSError as error:
        raise OutputError(
            f"port {port}: {error.strerror}. Choose another port, or 0 for any free one."
        ) from None
    with server:
        yield f"http://{HOST}:{server.server_port}{view.page}", server.serve_forever
