"""Settings of the batch job that `bsearch submit` creates for a study.

They end up in job scripts, requests and command-line arguments, so each is restricted to the few characters that it needs:
an accepted value means the same everywhere, quoted or not. Everything else about a cluster is a line of the user's template.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, StrictInt, StrictStr

from ..domain import PathText, Section, fault


def _like(pattern: str, expected: str) -> AfterValidator:
    """A validator that a string matches a pattern; newlines never match."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise fault(f"expected {expected}, got {value!r}")
        return value

    return AfterValidator(check)


Variable = Annotated[
    StrictStr, _like(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable, without its value")
]
# What may follow ray@.
_ADDRESS = r"(https?|ray)://[A-Za-z0-9.\-\[\]:/_~%]+|[A-Za-z0-9.-]+:[0-9]+"


def _launcher(value: str) -> str:
    name, at, place = value.partition("@")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise fault(f"expected a name of letters, digits, '_', '.' and '-', got {value!r}")
    if at and name != "ray":
        raise fault(f"expected ray, ray@ADDRESS, slurm, or the name of a plug-in alone, got {value!r}")
    if at and not re.fullmatch(_ADDRESS, place):
        raise fault(f"expected ray@http://host:8265 or ray@host:6379, got {value!r}")
    return value


class Submit(Section):
    """The batch job that `bsearch submit` creates; not part of the study's identity."""

    launcher: Annotated[StrictStr, AfterValidator(_launcher)] | None = Field(
        None,
        description="ray, slurm, or the launcher of a plug-in; ray@http://host:8265 names a Ray cluster by its dashboard "
        "(default: RAY_ADDRESS, otherwise this machine).",
    )
    template: PathText | None = Field(
        None,
        description="A file with what your cluster needs besides, relative to the study file: the head of an sbatch script, "
        "or options of a Ray job; default: the one that comes with bsearch.",
    )
    nodes: StrictInt = Field(1, ge=1, description="Machines of the job.")
    gpus_per_node: StrictInt = Field(0, ge=0, description="GPUs per machine.")
    cpus_per_node: StrictInt = Field(4, ge=1, description="CPU cores per machine.")
    environment: tuple[Variable, ...] = Field(
        (), description="Environment variables passed on to the job, by name."
    )

    @property
    def place(self) -> str:
        """What follows launcher@: an address, or nothing."""
        return (self.launcher or "").partition("@")[2]
