"""Checks that Ray works here: starts or joins it as `run` would, in a subprocess with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..search.preview.doctor import Finding
from ..spaces.boundary.secrets import masked
from ..spaces.study.cluster import Cluster
from ..spaces.study.devices import Devices

# Ray starts within seconds, on a busy machine within half a minute.
LIMIT_S = 120.0


def ray_findings(cluster: Cluster, devices: Devices, limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Start Ray, or join the study's cluster, run a Ray task there, and clean up."""
    request = json.dumps(
        {"cluster": cluster.model_dump(mode="json"), "devices": devices.model_dump(mode="json")}
    )
    command = [sys.executable, "-m", f"{__package__}.doctor", request]
    started = time.monotonic()
    with subprocess.Popen(  # noqa: S603
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        process_group=0,
    ) as process:
        try:
            out, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            where = "started" if cluster.address == "local" else f"reached at {cluster.address}"
            advice = "Possible causes: a firewall between the machines, a full disk, an overloaded machine. See `ray status`."
            yield Finding(
                "ray", "problem", f"could not be {where} within {limit_s:.0f} s", _advice("", advice)
            )
            return
        finally:
            # Ray's own processes are in the same group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    took_s = time.monotonic() - started
    try:
        answer = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        message = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        advice = _advice(message, "`bsearch --debug run STUDY` shows more.")
        yield Finding("ray", "problem", f"exited without an answer: {masked(message)}", advice)
        return
    if "error" in answer:
        message = masked(answer["error"])
        yield Finding(
            "ray", "problem", message, _advice(message, "Check the address and that Ray runs there.")
        )
        return
    machines = f"{answer['machines']} machine{'s' * (answer['machines'] != 1)}"
    how = "starts" if answer["started"] else f"runs at {answer['address']}"
    found = f"Ray {answer['version']} {how} and answers ({took_s:.0f} s): {machines}, room for {answer['slots']} trials at once"
    here = platform.python_version()
    if answer["python"] != here:
        advice = "Install the same version of Python on all machines: they exchange pickled values."
        yield Finding(
            "ray", "warning", f"{found}; its workers run Python {answer['python']}, this is {here}", advice
        )
    else:
        yield Finding("ray", "ok", found)
    for sentence in answer["said"]:
        if "Ray counts" in sentence:  # another number of GPUs than torch can use
            yield Finding(
                "ray", "warning", masked(sentence), "docs/machines.md says which devices trials run on."
            )


def _advice(message: str, otherwise: str) -> str:
    """What to do about a message of Ray's."""
    if "ersion mismatch" in message:
        return "Install the same versions of Ray and Python on all machines, or stop the old Ray: ray stop"
    if address := os.environ.get("RAY_ADDRESS"):
        return f"RAY_ADDRESS={address} is set: unset it to start Ray here, or start Ray there."
    return otherwise


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """What Ray reports; runs in the subprocess."""
    from .tune import TuneRunner  # sets environment variables that Ray reads when it is imported

    import ray  # isort: skip

    with tempfile.TemporaryDirectory(prefix="bsearch-doctor-") as folder:
        said: list[str] = []
        runner = TuneRunner(
            Cluster(**request["cluster"]),
            Devices(**request["devices"]),
            Path(folder) / "ray.log",
            said.append,
        )
        with runner:
            version = ray.remote(num_cpus=0, max_calls=1)(platform.python_version)
            return {
                "python": ray.get(version.remote(), timeout=LIMIT_S),
                "version": ray.__version__,
                "started": runner.owns_workers,
                "address": ray.get_runtime_context().gcs_address,
                "machines": sum(bool(node["Alive"]) for node in ray.nodes()),
                "slots": runner.slots,
                "said": said,
            }


def _main() -> None:
    try:
        answer = _answer(json.loads(sys.argv[1]))
    except Exception as error:
        # The file with Ray's own messages has been deleted by the time this is read.
        answer = {"error": str(error).partition(" Its own messages are in ")[0]}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
