"""optuna-dashboard on a study's database, with bsearch's own results added to its pages.

Nothing is written to the database: notes, names, marks and the front are added to the server's responses. They are as recent as
the trials, and the driver stays the only process that writes to a study (docs/decisions/0015-dashboard.md).
"""

from __future__ import annotations

import http
import ipaddress
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from ...spaces.errors import BsearchError, NoStudyError, OutputError, StudyFileError
from ...spaces.storage import masked
from ...spaces.trial import TrialRecord
from ..store.optuna_storage import open_storage
from ..store.stored import StoredStudy
from .notes import study_note, trial_note
from .terminal.tables import front_summary

HOST = "127.0.0.1"
_PAGES, _REPORTS = "/dashboard/studies", "/bsearch/reports"
_STUDY = re.compile(r"/api/studies/(\d+)")
_REPORT = re.compile(rf"{_REPORTS}/(\d+)")
_NOTE = re.compile(r"/api/studies/\d+(/\d+)?/note")
# A study is read again, and the summary of its front (which takes seconds of fitting) computed again, only after a pause: this
# many times as long as it took, and at least this many seconds.
_READ_PAUSE, _SUMMARY_PAUSE, _LEAST_PAUSE_S = 5, 20, 2.0
# A report may contain untrusted names, and it is served from a site where notes can be written: the sandbox isolates it.
_REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads allow-popups allow-modals; default-src 'none'; img-src data: blob:; font-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)

_Response = tuple[str, list[tuple[str, str]], bytes]


@dataclass(slots=True)
class _Cached:
    """What is cached of a study between responses."""

    stored: StoredStudy
    read_again_at: float = 0.0
    summary: tuple[str, ...] | None = None  # None until it is computed
    summarised: int = -1  # ended trials that the summary covers, or will cover
    summary_again_at: float = 0.0
    tracebacks: dict[int, str] = field(default_factory=dict)


class Pages:
    """The dashboard as a WSGI application.

    Args:
        stored: the study it is opened for; other studies in the same database are shown as well.
        study: the study as commands name it: its file, or its masked URL.
        results: folder with a subfolder for each study's files, including its report.
    """

    def __init__(self, stored: StoredStudy, study: str, results: Path) -> None:
        try:
            from optuna_dashboard import wsgi
        except ImportError:
            raise StudyFileError("optuna-dashboard is not installed. Install it: pip install 'bsearch[dashboard]'") from None
        # It logs failures with their tracebacks; its responses name them.
        logging.getLogger("optuna_dashboard").setLevel(logging.CRITICAL)
        self._storage = open_storage(stored.url)
        self._server: Callable[..., Iterable[bytes]] = wsgi(self._storage)
        self._url, self._name, self._study, self._results = stored.url, stored.name, study, results
        self._cached: dict[str, _Cached] = {}
        self._reading = threading.Lock()
        self.page = f"{_PAGES}/{self._storage.get_study_id_from_name(stored.name)}"
        self._remember(stored, 0.0)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        path, method = environ.get("PATH_INFO", ""), environ.get("REQUEST_METHOD", "GET")
        try:
            if refusal := _refused(environ, path, method):
                response = _error(http.HTTPStatus.FORBIDDEN, refusal)
            elif report := _REPORT.fullmatch(path):
                response = self._report(int(report[1]))
            elif method == "GET" and _STUDY.fullmatch(path):
                response = self._study_response(environ)
            else:
                return self._server(environ, start_response)
        except BsearchError as error:  # such as a database that is unavailable
            response = _error(http.HTTPStatus.SERVICE_UNAVAILABLE, masked(str(error)))
        status, headers, body = response
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body if method != "HEAD" else b""]

    def _study_response(self, environ: Mapping[str, Any]) -> _Response:
        """The dashboard's own response about a study, with our additions."""
        status, headers, body = self._request(environ)
        if not status.startswith("200"):
            return status, headers, body
        document = json.loads(body)
        with self._reading:
            cached = self._read(document["name"])
            if cached is not None:
                self._add(document, cached, environ)
        return status, headers, json.dumps(document).encode()

    def _request(self, environ: Mapping[str, Any]) -> _Response:
        started: list[Any] = []
        body = b"".join(self._server(dict(environ), lambda status, headers, *error: started.extend((status, headers))))
        status, headers = started[-2:]
        return status, [(name, value) for name, value in headers if name.lower() != "content-length"], body

    def _read(self, name: str) -> _Cached | None:
        """The study of this name as read recently; None if it is not one of ours."""
        start, cached = time.monotonic(), self._cached.get(name)
        if cached is None or start >= cached.read_again_at:
            try:
                stored = cached.stored.reread() if cached else StoredStudy.open(self._url, name)
            except (NoStudyError, StudyFileError):
                return None
            if stored.name != name:
                return None
            return self._remember(stored, time.monotonic() - start)
        return cached

    def _remember(self, stored: StoredStudy, took_s: float) -> _Cached:
        cached = self._cached.setdefault(stored.name, _Cached(stored))
        now = time.monotonic()
        cached.stored, cached.read_again_at = stored, now + max(_READ_PAUSE * took_s, _LEAST_PAUSE_S)
        ended = sum(record.has_ended for record in stored.records)
        if ended != cached.summarised and now >= cached.summary_again_at:
            cached.summarised, cached.summary_again_at = ended, math.inf
            threading.Thread(target=_summarise, args=(cached, stored), daemon=True).start()
        return cached

    def _add(self, document: MutableMapping[str, Any], cached: _Cached, environ: Mapping[str, Any]) -> None:
        """Add names, the front's members, marks and notes to a study's document."""
        stored = cached.stored
        document.setdefault("objective_names", stored.spec.objectives.names)
        serialized = {trial["number"]: trial for trial in [*document["best_trials"], *document["trials"]]}
        members = [trial.number for trial in stored.front.trials]
        if any(number not in serialized for number in members):  # the page requested only its newest trials
            full = json.loads(self._request({**environ, "QUERY_STRING": ""})[2])
            serialized |= {trial["number"]: trial for trial in full["trials"]}
        document["best_trials"] = [serialized[number] for number in members if number in serialized]
        study = self._study if stored.name == self._name else f"{masked(self._url)} --name {stored.name}"
        for record in stored.records:
            if record.number in serialized:
                trial = serialized[record.number]
                if record.outcome == "diverged":
                    trial["constraints"] = [1.0]
                if trial["note"]["version"] == 0:
                    traceback = self._traceback(cached, record)
                    trial["note"]["body"] = trial_note(record, stored.spec, stored.front, study=study, traceback=traceback)
                    # The note shows the message with line breaks; as an attribute it would widen the page.
                    trial["user_attrs"] = [one for one in trial["user_attrs"] if one["key"] != "message"]
        if document["note"]["version"] == 0:
            identity = _STUDY.fullmatch(environ["PATH_INFO"])
            assert identity is not None
            document["note"]["body"] = study_note(
                stored,
                cached.summary,
                study=study,
                page=f"{_PAGES}/{identity[1]}",
                report=f"{_REPORTS}/{identity[1]}" if self._report_file(stored.name).is_file() else None,
            )

    def _traceback(self, cached: _Cached, record: TrialRecord) -> str:
        if record.outcome != "error":
            return ""
        if record.number not in cached.tracebacks:
            attempts = cached.stored.tables().attempts(cached.stored.name, record.number)
            cached.tracebacks[record.number] = next((one["traceback"] for one in reversed(attempts) if one["traceback"]), "")
        return cached.tracebacks[record.number]

    def _report_file(self, name: str) -> Path:
        return self._results / name / "report.html"

    def _report(self, study_id: int) -> _Response:
        try:
            name = self._storage.get_study_name_from_id(study_id)
            with self._reading:
                cached = self._read(name)
        except KeyError:
            cached = None
        if cached is None or not self._report_file(cached.stored.name).is_file():
            return _error(http.HTTPStatus.NOT_FOUND, "there is no report yet; `bsearch report STUDY` writes it")
        body = self._report_file(cached.stored.name).read_bytes()
        headers = [("Content-Type", "text/html; charset=utf-8"), ("Content-Security-Policy", _REPORT_POLICY), *_SAFE]
        return "200 OK", headers, body


def _summarise(cached: _Cached, stored: StoredStudy) -> None:
    start = time.monotonic()
    try:
        cached.summary = tuple(front_summary(stored.with_rates()))
    finally:
        cached.summary_again_at = time.monotonic() + max(_SUMMARY_PAUSE * (time.monotonic() - start), _LEAST_PAUSE_S)


_SAFE = [("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-store")]


def _error(status: http.HTTPStatus, reason: str) -> _Response:
    """An error response in the form that the dashboard's pages display."""
    return (
        f"{status.value} {status.phrase}",
        [("Content-Type", "application/json"), *_SAFE],
        json.dumps({"reason": reason}).encode(),
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
    return "only notes can be written here: trials are written by the study's driver, which also keeps tables of its own"


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
def dashboard_server(stored: StoredStudy, study: str, results: Path, port: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """A dashboard that listens on the loopback interface only.

    Args:
        stored, study, results: as for `Pages`.
        port: 0 selects any free port.

    Yields:
        The address of the study's page, and a function that serves it until interrupted.

    Raises:
        StudyFileError: optuna-dashboard is not installed.
        OutputError: the port is taken or not allowed, or the storage cannot be opened.
    """
    pages = Pages(stored, study, results)
    try:
        server = make_server(HOST, port, pages, server_class=_Server, handler_class=_Quiet)
    except OSError as error:
        raise OutputError(f"port {port}: {error.strerror}. Choose another port, or 0 for any free one.") from None
    with server:
        yield f"http://{HOST}:{server.server_port}{pages.page}", server.serve_forever
