"""Numbers for Prometheus: those of the run, served while it runs and where it was asked for alone."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from bsearch.cli import main
from bsearch.search.report.metrics import address_of
from bsearch.spaces.errors import StudyFileError
from click.testing import CliRunner
from conftest import BSEARCH, TASKS


@pytest.mark.parametrize("text", ["9100", ":9100", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:70000", "localhost:http"])
def test_what_is_no_address_is_told(text: str) -> None:
    with pytest.raises(StudyFileError, match=r"--metrics: expected HOST:PORT such as 127\.0\.0\.1:9100, got"):
        address_of(text)
    assert address_of("[::1]:80") == ("::1", 80)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_port_that_is_taken_is_told_before_anything_starts(study_file: Callable[..., Path]) -> None:
    pytest.importorskip("prometheus_client")
    path = study_file(task=f"{TASKS}:Points", budget={"trials": 1, "profile_s": 0})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = CliRunner().invoke(main, ["run", str(path), "--serial", "--metrics", f"127.0.0.1:{port}"])
    assert told.exit_code == 2
    assert f"--metrics 127.0.0.1:{port}: nothing can listen there: " in told.output
    assert not (path.parent / "study.db").exists()


@pytest.mark.long
def test_a_run_serves_its_numbers_and_stops_when_it_ends(study_file: Callable[..., Path]) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    path = study_file(
        task=f"{TASKS}:Slow",
        space={"effective_batch": 40, "reference_rate": {"low": 0.1, "high": 0.2}, "epochs": 1},
        budget={"trials": 4, "profile_s": 0},
    )
    port = free_port()
    command = [BSEARCH, "run", path, "--serial", "--metrics", f"127.0.0.1:{port}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seen: dict[str, float] = {}
    try:
        limit = time.monotonic() + 200
        while seen.get("bsearch_counted_trials", 0) < 2:
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.1)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
                    text = page.read().decode()
            except OSError:
                continue
            samples = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]
            assert all(sample.labels["study"] == "small" for sample in samples)
            seen = {sample.name: sample.value for sample in samples}
        assert seen["bsearch_budget_trials"] == 4
        assert seen["bsearch_trials_total"] == seen["bsearch_counted_trials"]
        assert seen["bsearch_ask_seconds_count"] >= 2
        assert seen["bsearch_devices_busy"] == seen["bsearch_trials_running"] <= 1
        assert 0 <= seen["bsearch_last_report_age_seconds"] < 60
        assert 0 < seen["bsearch_best_score"] <= 1
        assert process.wait(200) == 0
    finally:
        process.kill()
        process.wait()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 1)
