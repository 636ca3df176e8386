"""What NVIDIA's own program says of a machine's GPUs, without torch."""

from __future__ import annotations

import subprocess


def nvidia_smi(query: str) -> list[list[str]]:
    """The values of a query, such as "name,memory.total", of each GPU; memory in MiB.

    Raises:
        OSError, subprocess.SubprocessError: it is not installed, or fails.
    """
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout  # noqa: S603
    return [row.split(", ") for row in listed.strip().splitlines()]
