"""What NVIDIA's own program says of a machine's GPUs, without torch."""

from __future__ import annotations

import os
import subprocess


def nvidia_smi(query: str) -> list[list[str]]:
    """The values of a query, such as "name,memory.total", of each GPU that this process may use; memory in MiB.

    Raises:
        OSError, subprocess.SubprocessError: it is not installed, or fails.
    """
    return _answered(f"--query-gpu={query}")


def gpu_processes() -> list[tuple[int, int]]:
    """The processes that compute on the GPUs that this one may use, and the bytes of each there, its context included.

    Raises:
        OSError, subprocess.SubprocessError: `nvidia-smi` is not installed, or fails.
    """
    rows = _answered("--query-compute-apps=pid,used_memory")
    return [(int(process), int(mib) << 20) for process, mib in rows if process.isdecimal() and mib.isdecimal()]


def _answered(query: str) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    if visible and "MIG" not in visible:  # of a MIG slice it answers no queries
        command.append(f"--id={visible}")
    listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout  # noqa: S603
    return [row.split(", ") for row in listed.strip().splitlines()]
