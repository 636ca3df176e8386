"""A running study's numbers for Prometheus, at an address that the user names."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...spaces.errors import StudyFileError
from ..run.study_run import StudyRun


class RunMetrics:
    """A collector of prometheus-client: reads the run when it is asked, so that nothing is kept twice."""

    def __init__(self, run: StudyRun) -> None:
        self.run = run

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        run, view = self.run, self.run.view()
        study = {"study": run.name}

        def gauge(name: str, text: str, value: float | None) -> Any:
            family = GaugeMetricFamily(f"bsearch_{name}", text, labels=list(study))
            family.add_metric(list(study.values()), math.nan if value is None else value)
            return family

        outcomes = CounterMetricFamily("bsearch_trials", "Trials that have ended, by outcome.", labels=[*study, "outcome"])
        for outcome, count in view.outcomes.items():
            outcomes.add_metric([*study.values(), outcome], count)
        yield outcomes
        asks = SummaryMetricFamily("bsearch_ask_seconds", "Seconds that the sampler took for a suggestion.", labels=list(study))
        asks.add_metric(list(study.values()), count_value=run.suggestions.asks, sum_value=run.suggestions.asks_s)
        yield asks
        yield gauge("budget_trials", "Trials of the budget.", view.trials)
        yield gauge("counted_trials", "Trials that count towards the budget.", view.counted)
        yield gauge("devices_busy", "Devices that trials train on.", sum(trial.devices for trial in view.running))
        yield gauge("trials_running", "Trials that train.", len(view.running))
        silent_s = None if run.reported_s is None else time.monotonic() - run.reported_s
        yield gauge("last_report_age_seconds", "Seconds since a trial last reported a measurement.", silent_s)
        yield gauge("left_seconds", "Estimated seconds until the budget is met.", view.eta_s)
        best = view.front.best
        yield gauge("best_score", f"Best {view.front.metric} on the front.", None if best is None else best.accuracy)


def address_of(text: str) -> tuple[str, int]:
    """Host and port of an address such as 127.0.0.1:9100.

    Raises:
        StudyFileError: it is none.

    >>> address_of("127.0.0.1:9100")
    ('127.0.0.1', 9100)
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise StudyFileError(f"--metrics: expected HOST:PORT such as 127.0.0.1:9100, got {text!r}")
    return host.strip("[]"), int(port)


@contextmanager
def metrics_server(address: str | None) -> Iterator[Callable[[StudyRun], None]]:
    """Serve a run's metrics at an address, if one is given; yields the function to call once the run is known.

    Raises:
        StudyFileError: no address, nothing can listen there, or prometheus-client is not installed.
    """
    if address is None:
        yield lambda run: None
        return
    host, port = address_of(address)
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise StudyFileError("--metrics: prometheus-client is not installed. Run pip install prometheus-client.") from None
    registry = CollectorRegistry()
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise StudyFileError(f"--metrics {address}: nothing can listen there: {error.strerror or error}") from None
    try:
        yield lambda run: registry.register(RunMetrics(run))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
