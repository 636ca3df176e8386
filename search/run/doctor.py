"""What `bsearch doctor` looks at on this machine: one function for each thing that goes wrong for people, each with advice."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from packaging.requirements import Requirement
from rich.text import Text

from ...spaces.errors import BsearchError, plain
from ...spaces.readable import readable_bytes
from ...spaces.storage import masked
from ...spaces.study import StudySpec
from ..store.database import storage_engine
from ..store.inspection import inspect_storage

State = Literal["ok", "warning", "problem"]

# The packages whose versions people are asked for; of the others only those that are missing or out of range are told.
_TOLD = (
    "torch",
    "torchvision",
    "ray",
    "optuna",
    "sqlalchemy",
    "optuna-dashboard",
    "plotly",
    "psycopg",
    "transformers",
    "lightning",
)
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Args:
        state: a problem keeps studies from running, a warning makes them slow or fragile.
        found: what was found, in words.
        advice: what to do; empty where nothing is to be done.
    """

    name: str
    state: State
    found: str
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[], Iterator[Finding]]


def examined(checks: Sequence[tuple[str, Check]]) -> Iterator[Finding]:
    """What every check finds; one that fails itself is a warning, never the end of the others."""
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding(name, "warning", f"could not be looked at: {type(error).__name__}: {masked(str(error))}")


def machine_checks(spec: StudySpec | None, storage: str | None) -> list[tuple[str, Check]]:
    """All that can be looked at without Ray.

    Args:
        spec: of the study; not given, the folder here and the machine alone are looked at.
        storage: its URL, or the one that the environment names.
    """
    return [
        ("packages", packages),
        ("cpu", lambda: cpu(spec)),
        ("memory", memory),
        ("gpu", lambda: gpu(spec)),
        ("files", open_files),
        ("shared memory", lambda: shared_memory()),
        ("disk", lambda: disks(spec, storage)),
        *([("storage", lambda: storage_findings(storage))] if storage else []),
    ]


# What is installed


def packages(distribution: str = "bsearch") -> Iterator[Finding]:
    """Versions, against the ranges that the package itself asks for."""
    python = sys.version.split()[0]
    try:
        asked = [Requirement(text) for text in metadata.requires(distribution) or ()]
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        advice = "Install it: pip install . in its checkout."
        yield Finding("packages", "warning", f"Python {python}; {distribution} runs without being installed", advice)
        return
    installed: dict[str, str] = {}
    faults = []
    for requirement in asked:
        extra = requirement.marker is not None and "extra" in str(requirement.marker)
        if requirement.marker is not None and not extra and not requirement.marker.evaluate():
            continue
        try:
            installed[requirement.name] = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if not extra:
                faults.append(
                    Finding("packages", "problem", f"{requirement.name} is missing", f"pip install '{_plain(requirement)}'")
                )
            continue
        if not requirement.specifier.contains(installed[requirement.name], prereleases=True):
            found = f"{requirement.name} {installed[requirement.name]}, where {requirement.specifier} is asked for"
            faults.append(Finding("packages", "warning" if extra else "problem", found, f"pip install '{_plain(requirement)}'"))
    told = ", ".join(f"{name} {installed[name]}" for name in _TOLD if name in installed)
    yield Finding("packages", "ok", f"bsearch {version}, Python {python}, {told}")
    yield from faults
    for module in ("torch", "torchvision"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(module)
        except Exception as error:  # binaries that do not belong together fail with anything
            said = (str(error).strip().splitlines() or [""])[0]
            advice = "torch and torchvision are made for each other: pip install --force-reinstall torch torchvision"
            yield Finding("packages", "problem", f"{module} cannot be imported: {type(error).__name__}: {said}", advice)
            return


def _plain(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


# The machine


def cgroup_limit(file: str, cgroups: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")) -> list[list[str]]:
    """The words of a limit's file (`cpu.max`, `memory.max`) in this process's control group and all above it."""
    try:
        own = re.search(r"^0::/(.*)$", mine.read_text(), re.MULTILINE)
    except OSError:
        return []
    inside = PurePosixPath(own[1] if own else "")
    found = []
    for folder in (inside, *inside.parents):
        try:
            found.append((cgroups / folder / file).read_text().split())
        except OSError:
            continue
    return found


def cpu(spec: StudySpec | None = None, limits: Sequence[Sequence[str]] | None = None) -> Iterator[Finding]:
    """Cores, those that a container may use, and threads."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [int(quota) / int(period) for quota, period in limits or cgroup_limit("cpu.max") if quota != "max"]
    allowed = min([float(there), *quotas])
    each = spec.devices.cpus if spec is not None else 1
    if allowed < there:
        yield Finding(
            "cpu",
            "warning",
            f"{there} cores are seen, but this container may use {allowed:g} of them",
            f"Write cluster.trials_at_once: {max(int(allowed // each), 1)} in the study: more would wait for one another.",
        )
    else:
        yield Finding("cpu", "ok", f"{there} cores, {each} to a trial")
    if each > allowed:
        advice = f"Write devices.cpus: {max(int(allowed), 1)} or less."
        yield Finding("cpu", "problem", f"devices.cpus: {each} is more than the {allowed:g} cores here", advice)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads and not threads.split(",")[0].strip().isdigit():
        yield Finding("threads", "warning", f"OMP_NUM_THREADS={threads!r} is no number", "unset OMP_NUM_THREADS")
    elif threads and int(threads.split(",")[0]) > there:
        found = f"OMP_NUM_THREADS={threads} is more than the {there} cores here"
        yield Finding("threads", "warning", found, "unset OMP_NUM_THREADS: workers get as many threads as devices.cpus says.")


def memory(meminfo: Path = Path("/proc/meminfo"), limits: Sequence[Sequence[str]] | None = None) -> Iterator[Finding]:
    """Main memory, and what of it this container may use."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    except OSError:
        return  # not Linux
    total, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    capped = [int(words[0]) for words in limits or cgroup_limit("memory.max") if words and words[0] != "max"]
    room = min([total, *capped])
    found = f"{readable_bytes(free)} of {readable_bytes(total)} are free"
    if room < total:
        found += f"; this container may use {readable_bytes(room)}"
    if min(free, room) < 2 * _GIB:
        yield Finding(
            "memory", "warning", found, "Ray and torch take over 1 GiB themselves: end what else runs, or give more memory."
        )
    else:
        yield Finding("memory", "ok", found)


def gpu(spec: StudySpec | None = None) -> Iterator[Finding]:
    """GPUs, as the machine and as torch see them."""
    wanted = spec is not None and spec.devices.kind == "gpu"
    import torch

    driver, machine = _nvidia()
    build = f"torch {torch.__version__}"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        for index in range(count):
            free, total = torch.cuda.mem_get_info(index)
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            about = f"GPU {index}: {name}, {readable_bytes(free)} of {readable_bytes(total)} free"
            about += f", driver {driver}" if driver else ""
            arch = f"sm_{capability[0]}{capability[1]}"
            built = torch.cuda.get_arch_list()
            # Code for a lower minor version of the same generation runs too.
            if torch.version.cuda and not any(one.startswith(f"sm_{capability[0]}") for one in built):
                advice = f"{build} is built for {', '.join(built)}: install a torch that knows {arch} (https://pytorch.org)."
                yield Finding("gpu", "problem", f"{about}; torch has no code for its {arch}", advice)
            elif free < total / 2:
                advice = "Another process holds its memory: see nvidia-smi, or choose GPUs with CUDA_VISIBLE_DEVICES."
                yield Finding("gpu", "warning", about, advice)
            else:
                yield Finding("gpu", "ok", about)
        return
    state: State = "problem" if wanted else "warning"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not machine:
        if wanted:
            yield Finding("gpu", "problem", "the study asks for GPUs, and there is none", "Write devices.kind: auto or cpu.")
        else:
            yield Finding("gpu", "ok", "none: trials run on the CPU")
    elif torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        advice = "Install a torch with CUDA (https://pytorch.org/get-started), for this one trains on the CPU alone."
        yield Finding("gpu", state, f"{machine}, but {build} is built without CUDA", advice)
    elif hidden is not None and hidden.strip() in ("", "-1"):
        advice = "unset CUDA_VISIBLE_DEVICES, or name GPUs in it."
        yield Finding("gpu", state, f"{machine}, hidden by CUDA_VISIBLE_DEVICES={hidden!r}", advice)
    else:
        why = f": {str(said[-1].message).splitlines()[0]}" if said else ""
        advice = f"torch wants CUDA {torch.version.cuda}: update the driver, or install a torch for an older CUDA."
        yield Finding("gpu", state, f"{machine}, driver {driver or 'unknown'}, but torch cannot use it{why}", advice)


def _nvidia() -> tuple[str, str]:
    """The driver's version and the GPUs as the machine itself knows them; empty words where there are none."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
        try:
            told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout  # noqa: S603
        except (OSError, subprocess.SubprocessError):
            return "", "nvidia-smi is there and fails"
        rows = [row.split(", ", 1) for row in told.strip().splitlines()]
        return (rows[0][0], ", ".join(row[-1] for row in rows)) if rows else ("", "")
    if Path("/proc/driver/nvidia/version").exists():
        return "", "an NVIDIA driver is loaded"
    return "", ""


def open_files(limits: tuple[int, int] | None = None) -> Iterator[Finding]:
    """Files and connections that one process may hold."""
    import resource

    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= 4096:
        yield Finding("files", "ok", f"a process may open {'any number of' if soft < 0 else soft} files")
        return
    more = "any number" if hard == resource.RLIM_INFINITY else min(hard, 65536)
    advice = f"ulimit -n {65536 if more == 'any number' else more} before `bsearch run`: Ray opens many for each worker."
    yield Finding("files", "problem" if soft < 512 else "warning", f"a process may open {soft} files", advice)


def shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:  # noqa: S108  # it is looked at, not written
    """The file system in memory that Ray's objects and loaders' batches travel through."""
    if not folder.is_dir():
        return  # not Linux
    usage = shutil.disk_usage(folder)
    found = f"{folder}: {readable_bytes(usage.free)} of {readable_bytes(usage.total)} are free"
    if usage.free < _GIB:
        advice = (
            "Give it some GiB: docker run --shm-size=4g, or an emptyDir of medium Memory on Kubernetes. With less, Ray is slow "
            "and a loader's worker dies with a bus error."
        )
        yield Finding("shared memory", "warning", found, advice)
    else:
        yield Finding("shared memory", "ok", found)


# Where things are written


def disks(spec: StudySpec | None, storage: str | None) -> Iterator[Finding]:
    """Room and permission where the database, checkpoints, results and Ray's session lie; a file system is told once."""
    folders: dict[str, Path] = {"results": (spec.folder if spec is not None else Path.cwd()) / "results"}
    if storage and storage.startswith("sqlite") and (database := storage_engine(storage).url.database):
        folders["the database"] = Path(database).parent
    if spec is not None and spec.cluster.checkpoints and "://" not in spec.cluster.checkpoints:
        folders["checkpoints"] = Path(spec.cluster.checkpoints)
    folders["Ray's session"] = Path(os.environ.get("RAY_TMPDIR") or "/tmp")  # noqa: S108  # Ray's own choice
    seen: dict[int, list[str]] = {}
    places: dict[int, Path] = {}
    for what, folder in folders.items():
        there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
        if not os.access(there, os.W_OK):
            yield Finding(
                "disk", "problem", f"{what}: {there} cannot be written", "Name another folder, or change its permissions."
            )
        device = there.stat().st_dev
        seen.setdefault(device, []).append(what)
        places.setdefault(device, there)
    for device, names in seen.items():
        yield disk(places[device], " and ".join((", ".join(names[:-1]), names[-1])).removeprefix(" and "))


def disk(folder: Path, what: str) -> Finding:
    """Room on the file system of a folder that exists."""
    usage, inodes = shutil.disk_usage(folder), os.statvfs(folder)
    found = f"{folder}: {readable_bytes(usage.free)} of {readable_bytes(usage.total)} are free, for {what}"
    if inodes.f_files and inodes.f_favail < 1000:
        return Finding(
            "disk", "problem", f"{folder}: {inodes.f_favail} more files can be made there, for {what}", "Delete small files."
        )
    if usage.free < _GIB:
        return Finding("disk", "problem", found, "Make room: databases and checkpoints that cannot be written end a study.")
    if "Ray" in what and usage.free < 0.05 * usage.total:
        return Finding(
            "disk",
            "warning",
            found,
            "Over 95 % full, Ray warns without end and moves no objects to disk: make room, or set RAY_TMPDIR.",
        )
    if usage.free < 5 * _GIB:
        return Finding("disk", "warning", found, "Checkpoints need room: make some, or write cluster.checkpoints: null.")
    return Finding("disk", "ok", found)


def storage_findings(url: str) -> Iterator[Finding]:
    """The study's database: whether it opens, whose it is, who holds it."""
    shown = masked(url)
    try:
        engine = storage_engine(url)
        database = engine.url.database
        if engine.dialect.name == "sqlite" and (not database or not Path(database).exists()):
            yield Finding("storage", "ok", f"{shown} is not there yet; `bsearch run` makes it")
            return
        look = inspect_storage(url)
    except BsearchError as error:
        yield Finding("storage", "problem", masked(str(error)))
        return
    if look.newer:
        found = f"{shown}: a newer bsearch has written it (its tables are of revision {look.revision})"
        yield Finding("storage", "problem", found, "Use that version of bsearch, or name another storage.")
        return
    if look.refusal:
        advice = "Change the permissions of the file and of its folder, or of the database's user."
        yield Finding("storage", "problem", f"{shown} opens, but cannot be written: {look.refusal}", advice)
    elif look.network:
        advice = "A local disk or PostgreSQL is faster and safer (docs/storage.md)."
        yield Finding("storage", "warning", f"{shown} lies on a network file system ({look.network})", advice)
    else:
        tables = "no study yet" if look.revision is None else f"tables of revision {look.revision}"
        yield Finding("storage", "ok", f"{shown}: opens and can be written, {tables}")
    for name, driver in look.drivers.items():
        since = driver.since.astimezone().strftime("%Y-%m-%d %H:%M")
        who = f"process {driver.process} on {driver.host}, since {since}"
        if driver.gone:
            found = f"{name}: its driver is gone ({who})"
            yield Finding("storage", "warning", found, "`bsearch run` takes it over and goes on from there.")
        else:
            yield Finding("storage", "ok", f"{name} is run by {who}; `bsearch show --watch` follows it")


def finding_line(finding: Finding) -> Text:
    """A finding for people, what to do in a line of its own."""
    styles = {"ok": "green", "warning": "yellow", "problem": "bold red"}
    line = Text.assemble((f"{finding.state:<8}", styles[finding.state]), f" {finding.name:<14} {plain(finding.found)}")
    if finding.advice:
        line.append(f"\n{'':<8} -> {plain(finding.advice)}")
    return line


def doctor_document(findings: Sequence[Finding]) -> Mapping[str, Any]:
    """The JSON document of `bsearch doctor --json`."""
    counts = {state: sum(one.state == state for one in findings) for state in ("ok", "warning", "problem")}
    return {"counts": counts, "findings": [one.to_dict() for one in findings]}
