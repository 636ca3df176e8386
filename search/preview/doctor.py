"""What `bsearch check` examines on this machine: one function per common problem, each with advice."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from ...objectives.machine.gpus import usable_gpus
from ...objectives.machine.host import bound_cores, container_cores
from ...spaces.boundary.distribution import installed_version
from ...spaces.boundary.secrets import masked
from ...spaces.boundary.storage import is_url
from ...spaces.errors import BsearchError, plain
from ...spaces.readable import readable_bytes
from ...spaces.study.spec import StudySpec
from ..store.database import RetryPolicy, storage_engine, translate_errors
from ..store.schema import revision_of, unknown_revision
from ..store.url import shown_url

State = Literal["ok", "warning", "problem"]

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Args:
        state: a `problem` prevents studies from running, a `warning` makes them slow or unreliable.
        found: what was found, in words.
        advice: what to do about it; may be empty.
    """

    name: str
    state: State
    found: str
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[], Iterator[Finding]]


def examined(checks: Sequence[tuple[str, Check]]) -> Iterator[Finding]:
    """The findings of all checks; a check that fails itself becomes a warning and does not end the others."""
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding(
                name, "warning", f"could not be checked: {type(error).__name__}: {masked(str(error))}"
            )


def machine_checks(spec: StudySpec | None, storage: str | None) -> list[tuple[str, Check]]:
    """All checks that do not need Ray.

    Args:
        spec: the study; without one, only the machine and the current folder are checked.
        storage: the study's storage URL, or the one set in the environment.
    """
    return [
        ("packages", packages),
        ("cpu", lambda: cpu(spec)),
        ("gpu", lambda: gpu(spec)),
        ("disk", lambda: disks(spec, storage)),
        *([("storage", lambda: storage_findings(storage))] if storage else []),
    ]


# Installed packages


def packages() -> Iterator[Finding]:
    """Whether torch's binaries go together; `pip check` compares versions."""
    yield Finding(
        "packages",
        "ok",
        f"Python {sys.version.split()[0]}, bsearch {installed_version()}, torch {version('torch')}",
    )
    for module in ("torch", "torchvision"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(module)
        except Exception as error:  # mismatched binaries fail with any exception
            message = (str(error).strip().splitlines() or [""])[0]
            advice = "Install matching builds of torch and torchvision: pip install --force-reinstall torch torchvision"
            yield Finding(
                "packages",
                "problem",
                f"{module} cannot be imported: {type(error).__name__}: {message}",
                advice,
            )
            return


# Machine


def cpu(spec: StudySpec | None = None, limits: Sequence[Sequence[str]] | None = None) -> Iterator[Finding]:
    """Cores, and the container's limit on them."""
    cores = bound_cores()
    allowed = min([float(cores), *container_cores(limits)])
    each = spec.devices.cores("cpu") if spec is not None else 1
    if allowed < cores:
        yield Finding(
            "cpu",
            "warning",
            f"{cores} cores are visible, but this container is limited to {allowed:g}",
            f"Set cluster.trials_at_once: {max(int(allowed // each), 1)} in the study: more trials would compete for cores.",
        )
    else:
        yield Finding("cpu", "ok", f"{cores} cores, {each} per trial")
    if each > allowed:
        advice = f"Set devices.cpus to {max(int(allowed), 1)} or less."
        yield Finding(
            "cpu", "problem", f"devices.cpus: {each} is more than the {allowed:g} cores here", advice
        )


def gpu(spec: StudySpec | None = None) -> Iterator[Finding]:
    """GPUs, as torch can use them: it has to hold a tensor on each, multiply, and compute in half precision."""
    required = spec is not None and spec.devices.kind == "gpu"
    state: State = "problem" if required else "warning"
    usable = usable_gpus(tries=True)
    for index, device in enumerate(usable.gpus):
        description = (
            f"GPU {index}: {device.name}, {readable_bytes(device.free_bytes)} of "
            f"{readable_bytes(device.total_bytes)} free"
        )
        if device.fault:
            of = "sm_{}{}".format(*device.capability) if device.is_cuda else "it"
            advice = f"Leave it out by CUDA_VISIBLE_DEVICES, or install a torch that supports {of}."
            yield Finding("gpu", state, f"{description}; {device.fault}", advice)
        elif device.free_bytes < device.total_bytes / 2:
            advice = (
                "Another process uses its memory: check nvidia-smi, or select GPUs with CUDA_VISIBLE_DEVICES."
            )
            yield Finding("gpu", "warning", description, advice)
        else:
            yield Finding("gpu", "ok", f"{description}; it multiplies, also in bf16 and fp16")
    if usable.gpus:
        return
    if usable.reason and (usable.advice or required):
        advice = usable.advice or "Set devices.kind to auto or cpu."
        yield Finding("gpu", state, f"torch can use no GPU: {usable.reason}", advice)
    elif usable.reason:
        yield Finding("gpu", "ok", f"none: {usable.reason}; trials run on the CPU")
    elif required:
        yield Finding(
            "gpu",
            "problem",
            "the study requires a GPU, but there is none",
            "Set devices.kind to auto or cpu.",
        )
    else:
        yield Finding("gpu", "ok", "none: trials run on the CPU")


# Disks and storage


def disks(spec: StudySpec | None, storage: str | None) -> Iterator[Finding]:
    """Free space and permissions for the database, checkpoints, results and Ray's session."""
    folders: dict[str, Path] = {"results": (spec.folder if spec is not None else Path.cwd()) / "results"}
    if storage and storage.startswith("sqlite") and (database := storage_engine(storage).url.database):
        folders["the database"] = Path(database).parent
    if spec is not None and spec.cluster.checkpoints and not is_url(spec.cluster.checkpoints):
        folders["checkpoints"] = Path(spec.cluster.checkpoints)
    folders["Ray's session"] = Path(os.environ.get("RAY_TMPDIR") or "/tmp")  # noqa: S108  # Ray's default
    for what, folder in folders.items():
        existing = next(
            parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists()
        )
        free = shutil.disk_usage(existing).free
        if not os.access(existing, os.W_OK):
            advice = "Choose another folder, or change its permissions."
            yield Finding("disk", "problem", f"{what}: {existing} is not writable", advice)
        elif free < _GIB:
            advice = "Free some space: a study ends if its database or checkpoints cannot be written."
            yield Finding("disk", "problem", f"{what}: {readable_bytes(free)} free at {existing}", advice)
        else:
            yield Finding("disk", "ok", f"{what}: {readable_bytes(free)} free at {existing}")


def storage_findings(url: str) -> Iterator[Finding]:
    """Whether the study's database opens; a run says what else is wrong with it before its first trial."""
    try:
        engine = storage_engine(url)
        if engine.dialect.name == "sqlite" and not Path(engine.url.database or "").is_file():
            yield Finding("storage", "ok", f"{shown_url(url)} does not exist yet; `bsearch run` creates it")
            return

        def looked_at() -> str:
            with translate_errors(url), engine.connect() as connection:
                return unknown_revision(revision_of(connection))

        unknown = RetryPolicy(url)(looked_at)
        engine.dispose()
        found, _, advice = (unknown or "opens").partition(". ")
        yield Finding("storage", "problem" if unknown else "ok", f"{shown_url(url)}: {found}", advice)
    except BsearchError as error:
        yield Finding("storage", "problem", masked(str(error)))


def finding_line(finding: Finding) -> Text:
    """A finding as text, with its advice on a separate line."""
    styles = {"ok": "green", "warning": "yellow", "problem": "bold red"}
    line = Text.assemble(
        (f"{finding.state:<8}", styles[finding.state]), f" {finding.name:<14} {plain(finding.found)}"
    )
    if finding.advice:
        line.append(f"\n{'':<8} -> {plain(finding.advice)}")
    return line


def doctor_document(findings: Sequence[Finding]) -> Mapping[str, Any]:
    """The JSON document of a check of the machine."""
    counts = {
        state: sum(finding.state == state for finding in findings) for state in ("ok", "warning", "problem")
    }
    return {"counts": counts, "findings": [finding.to_dict() for finding in findings]}
