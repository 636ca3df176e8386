"""Whether Ray works here: started or reached as `run` would, in a process of its own that is given a time."""

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

from ..search.run.doctor import Finding
from ..spaces.storage import masked
from ..spaces.study import Cluster, Devices

# Ray starts in seconds; on a busy machine in half a minute.
LIMIT_S = 120.0


def ray_findings(cluster: Cluster, devices: Devices, limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Start Ray, or join the study's, run a task there, and leave nothing behind."""
    asked = json.dumps({"cluster": cluster.model_dump(mode="json"), "devices": devices.model_dump(mode="json")})
    command = [sys.executable, "-m", f"{__package__}.doctor", asked]
    begun = time.monotonic()
    with subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, process_group=0
    ) as process:
        try:
            out, told = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            where = "started" if cluster.address == "local" else f"reached at {cluster.address}"
            advice = "A firewall between the machines, a full disk, or a machine too busy makes it so; `ray status` tells more."
            yield Finding("ray", "problem", f"could not be {where} within {limit_s:.0f} s", _advice("", advice))
            return
        finally:
            # Ray's own processes end with the one that started them.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    took_s = time.monotonic() - begun
    try:
        answer = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = (told.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        yield Finding(
            "ray", "problem", f"ended without an answer: {masked(said)}", _advice(said, "bsearch --debug run STUDY tells more.")
        )
        return
    if "error" in answer:
        said = masked(answer["error"])
        yield Finding("ray", "problem", said, _advice(said, "Look at the address, and whether Ray runs there."))
        return
    machines = f"{answer['machines']} machine{'s' * (answer['machines'] != 1)}"
    did = "starts" if answer["started"] else f"runs at {answer['address']}"
    found = f"Ray {answer['version']} {did} and answers ({took_s:.0f} s): {machines}, room for {answer['slots']} trials at once"
    here = platform.python_version()
    if answer["python"] != here:
        advice = "Use the same Python on all machines: values travel between them."
        yield Finding("ray", "warning", f"{found}; its workers run Python {answer['python']}, this is {here}", advice)
    else:
        yield Finding("ray", "ok", found)


def _advice(said: str, otherwise: str) -> str:
    """What to do, by what Ray said."""
    if "ersion mismatch" in said:
        return "Install the same versions of Ray and Python on all machines, or stop the old Ray: ray stop"
    if address := os.environ.get("RAY_ADDRESS"):
        return f"RAY_ADDRESS={address} is set: unset it to start Ray here, or start Ray there."
    return otherwise


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What Ray tells, in the process that is given a time."""
    from .tune import TuneRunner  # which says to Ray what has to be said before Ray is imported

    import ray  # isort: skip

    with tempfile.TemporaryDirectory(prefix="bsearch-doctor-") as folder:
        runner = TuneRunner(Cluster(**asked["cluster"]), Devices(**asked["devices"]), Path(folder) / "ray.log")
        with runner:
            version = ray.remote(num_cpus=0, max_calls=1)(platform.python_version)
            return {
                "python": ray.get(version.remote(), timeout=LIMIT_S),
                "version": ray.__version__,
                "started": runner.started,
                "address": ray.get_runtime_context().gcs_address,
                "machines": sum(bool(node["Alive"]) for node in ray.nodes()),
                "slots": runner.slots,
            }


def _main() -> None:
    try:
        answer = _answer(json.loads(sys.argv[1]))
    except Exception as error:
        # The file with Ray's own messages is gone when this is read.
        answer = {"error": str(error).partition(" Its own messages are in ")[0]}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
