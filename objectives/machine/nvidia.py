"""What NVIDIA's own program says of a machine's GPUs, without torch."""

from __future__ import annotations

import os
import subprocess


def nvidia_smi(query: str) -> list[list[str]]:
    """The values of a query, such as "name,memory.total", of each GPU that this process may use; memory in MiB.

    Raises:
        OSError, subprocess.SubprocessError: it is not installed, or fails.
    """
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    if visible and "MIG" not in visible:  # of a MIG slice it answers no queries
        command.append(f"--id={visible}")
    listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout  # noqa: S603
    return [row.split(", ") for row in listed.strip().splitlines()]
