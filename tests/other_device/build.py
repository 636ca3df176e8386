"""The library of `backend.cpp`, compiled once, and the environment in which every Python process loads it with torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
TESTS = HERE.parent
SOURCE = HERE / "backend.cpp"


def library() -> Path:
    """The compiled device; skips the test where there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile tests/other_device/backend.cpp")
    torch_folder = Path(torch.__file__).parent
    name = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    built = TESTS.parent / ".cache" / "other_device" / f"{name}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        written = built.with_suffix(f".{os.getpid()}")
        libraries = [f"-L{torch_folder}/lib", "-ltorch_cpu", "-lc10", "-ltorch"]
        flags = ["-O0", "-shared", "-fPIC", "-std=c++20", "-w", f"-I{torch_folder}/include"]
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(written), *libraries], check=True)
        written.rename(built)
    return built


def environment(**variables: str) -> dict[str, str]:
    """Of a process, and of all that it starts, that has the device."""
    places = [str(HERE / "site"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        "TWIN_LIBRARY": str(library()),
        "PYTHONDONTWRITEBYTECODE": "",  # torch compiled anew takes as long as most of these tests
        **variables,
    }
