"""A machine's GPUs as `nvidia-smi` reports them, without torch."""

from __future__ import annotations

import os
import subprocess


def nvidia_smi(query: str) -> list[list[str]]:
    """The values of a query, such as "name,memory.total", of each GPU that this process may use; memory in MiB.

    Raises:
        OSError, subprocess.SubprocessError: it is not installed, or fails.
    """
    return _answered(f"--query-gpu={query}")


def gpu_processes(uuid: str = "") -> list[tuple[int, int]]:
    """The processes that compute on a GPU, and the bytes of each there, its context included.

    Args:
        uuid: of the GPU; default: all that this process may use.

    Raises:
        OSError, subprocess.SubprocessError: `nvidia-smi` is not installed, or fails.
    """
    rows = [row for row in _answered("--query-compute-apps=gpu_uuid,pid,used_memory") if len(row) == 3]
    of_gpu = [row[1:] for row in rows if uuid in ("", row[0])]
    return [
        (int(process), int(mib) << 20) for process, mib in of_gpu if process.isdecimal() and mib.isdecimal()
    ]


def _answered(query: str) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    if visible and "MIG" not in visible:  # of a MIG slice it answers no queries
        command.append(f"--id={visible}")
    listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout  # noqa: S603
    return [row.split(", ") for row in listed.strip().splitlines()]
