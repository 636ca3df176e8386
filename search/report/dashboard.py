"""optuna-dashboard on a study's database, with what bsearch knows of its studies added to the pages.

Nothing of that is written: notes, names, marks and the members of the front are put into the server's answers, so they are as
new as the trials, and the driver stays the only one that writes to a study (docs/decisions/0015-dashboard.md).
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

from ...spaces.errors import BsearchError, OutputError, StudyFileError
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
# What is read of a study, and the words under its front, which take seconds of fitting, are found anew only after a rest: so
# many times what they took, and at least so many seconds.
_READ_REST, _WORDS_REST, _LEAST_REST_S = 5, 20, 2.0
# A report may hold what strangers named, and it is served where notes can be written: it runs as if from another site.
_REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads allow-popups allow-modals; default-src 'none'; img-src data: blob:; font-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)

_Answer = tuple[str, list[tuple[str, str]], bytes]


@dataclass(slots=True)
class _Known:
    """What is remembered of a study between two answers."""

    kept: StoredStudy
    read_again_at: float = 0.0
    words: tuple[str, ...] | None = None  # None until they are found
    first_line: int = -1  # ended trials that they are of, or will be
    words_again_at: float = 0.0
    tracebacks: dict[int, str] = field(default_factory=dict)


class Pages:
    """The dashboard as a WSGI application.

    Args:
        kept: the study that it was opened for; others of the same database are shown as well.
        study: how commands name that study: its file, or its masked URL.
        results: folder that holds a folder for each study's files, its report among them.
    """

    def __init__(self, kept: StoredStudy, study: str, results: Path) -> None:
        try:
            from optuna_dashboard import wsgi
        except ImportError:
            raise StudyFileError("optuna-dashboard is not installed. Install it: pip install 'bsearch[dashboard]'") from None
        # It tells failures with their tracebacks; its answers name them.
        logging.getLogger("optuna_dashboard").setLevel(logging.CRITICAL)
        self._storage = open_storage(kept.url)
        self._server: Callable[..., Iterable[bytes]] = wsgi(self._storage)
        self._url, self._name, self._study, self._results = kept.url, kept.name, study, results
        self._known: dict[str, _Known] = {}
        self._reading = threading.Lock()
        self.page = f"{_PAGES}/{self._storage.get_study_id_from_name(kept.name)}"
        self._remember(kept, 0.0)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        path, method = environ.get("PATH_INFO", ""), environ.get("REQUEST_METHOD", "GET")
        try:
            if refusal := _refused(environ, path, method):
                answer = _told(http.HTTPStatus.FORBIDDEN, refusal)
            elif report := _REPORT.fullmatch(path):
                answer = self._report(int(report[1]))
            elif method == "GET" and _STUDY.fullmatch(path):
                answer = self._study_answer(environ)
            else:
                return self._server(environ, start_response)
        except BsearchError as error:  # such as a database that went away
            answer = _told(http.HTTPStatus.SERVICE_UNAVAILABLE, masked(str(error)))
        status, headers, body = answer
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body if method != "HEAD" else b""]

    def _study_answer(self, environ: Mapping[str, Any]) -> _Answer:
        """The dashboard's own answer about a study, with what we know of it."""
        status, headers, body = self._asked(environ)
        if not status.startswith("200"):
            return status, headers, body
        document = json.loads(body)
        with self._reading:
            known = self._read(document["name"])
            if known is not None:
                self._add(document, known, environ)
        return status, headers, json.dumps(document).encode()

    def _asked(self, environ: Mapping[str, Any]) -> _Answer:
        began: list[Any] = []
        body = b"".join(self._server(dict(environ), lambda status, headers, *error: began.extend((status, headers))))
        status, headers = began[-2:]
        return status, [(name, value) for name, value in headers if name.lower() != "content-length"], body

    def _read(self, name: str) -> _Known | None:
        """The study of a name, as the database held it a moment ago; None where it is none of ours."""
        begun, known = time.monotonic(), self._known.get(name)
        if known is None or begun >= known.read_again_at:
            try:
                kept = known.kept.reread() if known else StoredStudy.open(self._url, name)
            except StudyFileError:
                return None
            if kept.name != name:
                return None
            return self._remember(kept, time.monotonic() - begun)
        return known

    def _remember(self, kept: StoredStudy, took_s: float) -> _Known:
        known = self._known.setdefault(kept.name, _Known(kept))
        now = time.monotonic()
        known.kept, known.read_again_at = kept, now + max(_READ_REST * took_s, _LEAST_REST_S)
        ended = sum(record.outcome not in ("running", "waiting") for record in kept.records)
        if ended != known.first_line and now >= known.words_again_at:
            known.first_line, known.words_again_at = ended, math.inf
            threading.Thread(target=_find_words, args=(known, kept), daemon=True).start()
        return known

    def _add(self, document: MutableMapping[str, Any], known: _Known, environ: Mapping[str, Any]) -> None:
        """Names, the front's members, marks and notes, into the document of a study."""
        kept = known.kept
        document.setdefault("objective_names", [kept.front.speed, kept.front.metric])
        serialized = {trial["number"]: trial for trial in [*document["best_trials"], *document["trials"]]}
        members = [trial.number for trial in kept.front.trials]
        if any(number not in serialized for number in members):  # the page has asked for its newest trials alone
            every = json.loads(self._asked({**environ, "QUERY_STRING": ""})[2])
            serialized |= {trial["number"]: trial for trial in every["trials"]}
        document["best_trials"] = [serialized[number] for number in members if number in serialized]
        study = self._study if kept.name == self._name else f"{masked(self._url)} --name {kept.name}"
        for record in kept.records:
            if record.number in serialized:
                trial = serialized[record.number]
                if record.outcome == "diverged":
                    trial["constraints"] = [1.0]
                if trial["note"]["version"] == 0:
                    traceback = self._traceback(known, record)
                    trial["note"]["body"] = trial_note(record, kept.spec, kept.front, study=study, traceback=traceback)
                    # The note tells it, broken into lines; as an attribute it makes the page as wide as it is long.
                    trial["user_attrs"] = [one for one in trial["user_attrs"] if one["key"] != "message"]
        if document["note"]["version"] == 0:
            identity = _STUDY.fullmatch(environ["PATH_INFO"])
            assert identity is not None
            document["note"]["body"] = study_note(
                kept,
                known.words,
                study=study,
                page=f"{_PAGES}/{identity[1]}",
                report=f"{_REPORTS}/{identity[1]}" if self._report_file(kept.name).is_file() else None,
            )

    def _traceback(self, known: _Known, record: TrialRecord) -> str:
        if record.outcome != "error":
            return ""
        if record.number not in known.tracebacks:
            attempts = known.kept.tables().attempts(known.kept.name, record.number)
            known.tracebacks[record.number] = next((one["traceback"] for one in reversed(attempts) if one["traceback"]), "")
        return known.tracebacks[record.number]

    def _report_file(self, name: str) -> Path:
        return self._results / name / "report.html"

    def _report(self, study_id: int) -> _Answer:
        try:
            name = self._storage.get_study_name_from_id(study_id)
            with self._reading:
                known = self._read(name)
        except KeyError:
            known = None
        if known is None or not self._report_file(known.kept.name).is_file():
            return _told(http.HTTPStatus.NOT_FOUND, "no report has been written yet; `bsearch report STUDY` writes it")
        body = self._report_file(known.kept.name).read_bytes()
        headers = [("Content-Type", "text/html; charset=utf-8"), ("Content-Security-Policy", _REPORT_POLICY), *_SAFE]
        return "200 OK", headers, body


def _find_words(known: _Known, kept: StoredStudy) -> None:
    begun = time.monotonic()
    try:
        known.words = tuple(front_summary(kept.with_rates()))
    finally:
        known.words_again_at = time.monotonic() + max(_WORDS_REST * (time.monotonic() - begun), _LEAST_REST_S)


_SAFE = [("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-store")]


def _told(status: http.HTTPStatus, reason: str) -> _Answer:
    """An answer in the form that the dashboard's pages show."""
    return (
        f"{status.value} {status.phrase}",
        [("Content-Type", "application/json"), *_SAFE],
        json.dumps({"reason": reason}).encode(),
    )


def _refused(environ: Mapping[str, Any], path: str, method: str) -> str | None:
    """Why a request gets no answer; None where it does.

    A page of another site may send requests here: by a name of its own that it lets point to this machine (then that name is in
    Host), or across sites (then its address is in Origin).
    """
    host = environ.get("HTTP_HOST", "")
    if not _this_machine(host):
        return "this dashboard answers to 127.0.0.1 and localhost only; docs/dashboard.md tells how to look on from elsewhere"
    if method in ("GET", "HEAD"):
        return None
    origin = environ.get("HTTP_ORIGIN")
    if origin is not None and urlsplit(origin).netloc != host:
        return "requests of other sites are refused"
    if method == "PUT" and _NOTE.fullmatch(path):
        return None
    return "here only notes can be written: a study's trials are its driver's, and bsearch keeps tables of its own beside them"


def _this_machine(host: str) -> bool:
    """Whether a Host header names this machine by its own names.

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
    """One thread a request: a plot that takes seconds holds up no other page."""

    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """No line for each of the page's requests."""


@contextmanager
def dashboard_server(kept: StoredStudy, study: str, results: Path, port: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """A dashboard that listens on this machine alone.

    Args:
        kept, study, results: as `Pages`.
        port: 0 takes any that is free.

    Yields:
        The address of the study's page, and what serves it until it is interrupted.

    Raises:
        StudyFileError: optuna-dashboard is not installed.
        OutputError: the port is taken or not allowed, or the storage cannot be opened.
    """
    pages = Pages(kept, study, results)
    try:
        server = make_server(HOST, port, pages, server_class=_Server, handler_class=_Quiet)
    except OSError as error:
        raise OutputError(f"port {port}: {error.strerror}. Name another with --port, or 0 for any that is free.") from None
    with server:
        yield f"http://{HOST}:{server.server_port}{pages.page}", server.serve_forever
