"""Which devices trials run on: torch's answer, Ray's promise and the study's wish, in every combination; and other machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from bsearch.objectives.machine import gpus, host
from bsearch.objectives.machine.device import bytes_here
from bsearch.objectives.machine.gpus import UsableGpus, usable_gpus
from bsearch.spaces.errors import ProfilingError, StudyFileError
from bsearch.spaces.study.devices import Devices

from fake_gpu.child import in_child
from fake_gpu.device import Cards

BROKEN = "the NVIDIA driver on your system is too old"

# By torch's count, Ray's count: what `auto` and `gpu` come to.
NONE = "Trials run on the CPU: torch can use no GPU."
GPUS = {
    (0, 0): NONE,
    (0, 1): "Trials run on the CPU: Ray counts 1 GPU, but torch can use none.",
    (0, 2): "Trials run on the CPU: Ray counts 2 GPUs, but torch can use none.",
    (1, 0): "Trials run on the CPU: torch can use 1 GPU, but Ray counts none. Start Ray with --num-gpus 1.",
    (1, 1): "Trials run on 1 GPU.",
    (
        1,
        2,
    ): "expected as many GPUs as Ray promises; it counts 2, torch can use 1. Start Ray with --num-gpus 1, without "
    "RAY_OVERRIDE_RESOURCES; or write kind: cpu.",
    (2, 0): "Trials run on the CPU: torch can use 2 GPUs, but Ray counts none. Start Ray with --num-gpus 2.",
    (2, 1): "Trials run on 1 GPU, of 2 that torch can use.",
    (2, 2): "Trials run on 2 GPUs.",
    ("broken", 0): f"Trials run on the CPU: torch can use no GPU: {BROKEN}.",
    ("broken", 1): f"Trials run on the CPU: Ray counts 1 GPU, but torch can use none: {BROKEN}.",
    ("broken", 2): f"Trials run on the CPU: Ray counts 2 GPUs, but torch can use none: {BROKEN}.",
}


@pytest.mark.parametrize("kind", ["auto", "cpu", "gpu"])
@pytest.mark.parametrize("of_ray", [0, 1, 2])
@pytest.mark.parametrize("torch", [0, 1, 2, "broken"])
def test_every_combination_of_counts_is_a_sentence(
    torch: Any, of_ray: int, kind: Literal["auto", "cpu", "gpu"]
) -> None:
    count, reason = (0, BROKEN) if torch == "broken" else (torch, "")
    expected = GPUS[torch, of_ray]
    try:
        device, said = Devices(kind=kind).kind_with(count, reason, of_ray)
    except StudyFileError as error:
        assert kind != "cpu"
        (fault,) = error.faults
        assert fault.key == "devices.kind"
        if (count, of_ray) == (1, 2):
            assert fault.message == expected
        else:
            assert kind == "gpu"
            because = expected.removeprefix("Trials run on the CPU: ")
            assert fault.message == (
                f"expected a GPU that trials can use; {because[:-1]}. `bsearch check` says more; or write kind: cpu or auto."
            )
        return
    if kind == "cpu":
        assert (device, said) == ("cpu", "Trials run on the CPU, as devices.kind says.")
        return
    assert said == expected
    assert device == ("gpu" if count and of_ray else "cpu")
    assert kind == "auto" or device == "gpu"


def test_without_ray_torchs_count_is_all_there_is() -> None:
    assert Devices().kind_with(2) == ("gpu", "Trials run on 2 GPUs.")
    assert Devices().kind_with(0) == ("cpu", NONE)


def asked() -> dict[str, Any]:
    usable = usable_gpus(tries=True)
    names = [one.name for one in usable.gpus]
    set_up = os.environ.get("PYTORCH_ALLOC_CONF", "")
    return {"set up": set_up, "count": usable.count, "names": names, "reason": usable.reason}


@pytest.mark.long
@pytest.mark.slow
def test_torch_is_asked_what_it_can_really_use() -> None:
    found = in_child(asked, Cards(count=2))
    assert (found["count"], found["names"], found["reason"]) == (2, ["Fake GPU"] * 2, "")
    assert found["set up"] in ("", "expandable_segments:True")
    broken = in_child(asked, Cards(broken="CUDA error: uncorrectable ECC error encountered"))
    assert broken["count"] == 0
    assert (
        "GPU 0 (Fake GPU): a tensor failed: CUDA error: uncorrectable ECC error encountered"
        in broken["reason"]
    )


@pytest.mark.slow
@pytest.mark.long
def test_where_segments_cannot_grow_the_allocator_is_set_up_without() -> None:
    found = in_child(asked, Cards(maps=False))
    assert (found["count"], found["reason"]) == (1, "")
    assert found["set up"] == "expandable_segments:False"
    users = in_child(
        asked, Cards(maps=False), PYTORCH_ALLOC_CONF="expandable_segments:True,max_split_size_mb:64"
    )
    assert users["count"] == 0
    assert "a tensor failed: CUDA driver error: operation not supported" in users["reason"]


def test_where_nothing_speaks_for_a_gpu_torch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr("bsearch.objectives.machine.gpus._may_have_one", lambda: False)
    usable_gpus.cache_clear()
    assert usable_gpus() == UsableGpus()
    monkeypatch.setattr(sys, "platform", "darwin")
    usable_gpus.cache_clear()
    assert usable_gpus().reason == "Apple's GPUs are not supported yet"
    usable_gpus.cache_clear()


def test_a_clone_that_is_not_installed_asks_torch_too(tmp_path: Path) -> None:
    (tmp_path / "bsearch").symlink_to(Path(gpus.__file__).parents[2])
    venv.create(tmp_path / "bare", symlinks=True)
    packages = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    # Folders of PYTHONPATH are searched without their .pth files: an installed bsearch is not found there.
    program = (
        "from bsearch.objectives.machine import gpus; print(gpus.__file__); print(gpus._answer(False).reason)"
    )
    command = [tmp_path / "bare" / "bin" / "python", "-c", program]
    asked = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": packages}, capture_output=True, text=True
    )
    file, reason = asked.stdout.splitlines()
    assert file.startswith(str(tmp_path))
    assert reason.startswith("torch "), reason


def test_graphics_that_do_not_compute_are_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "entry_points", lambda group: ())
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    monkeypatch.setattr(gpus.Path, "exists", lambda path: str(path).startswith("/dev/dri"))
    assert not gpus._may_have_one()
    monkeypatch.setattr(gpus, "version", lambda name: "2.14.1+xpu")
    assert gpus._may_have_one()


def test_an_accelerator_that_does_not_tell_its_memory_is_refused_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bsearch.objectives.machine.accelerator.memory_info", lambda device=None: (0, 0))
    monkeypatch.setattr("bsearch.objectives.machine.accelerator.device_name", lambda device=None: "Card")
    with pytest.raises(ProfilingError, match="torch does not tell how much memory Card has"):
        bytes_here("gpu", 1.0)


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("", "asking torch failed: exit code 3"),
        ("Segmentation fault", "asking torch failed: Segmentation fault"),
    ],
)
def test_a_driver_that_crashes_is_a_reason(
    printed: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed = [sys.executable, "-c", f"import sys; sys.stderr.write({printed!r}); sys.exit(3)"]
    honest = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda _, **options: honest(crashed, **options))
    monkeypatch.setattr("bsearch.objectives.machine.gpus._may_have_one", lambda: True)
    usable_gpus.cache_clear()
    assert usable_gpus().reason == reason
    usable_gpus.cache_clear()


# Other machines

STUDY = {
    "study": "small",
    "task": "bsearch.objectives.digits:Digits",
    "space": {
        "effective_batch": {"low": 64, "high": 512},
        "reference_rate": {"low": 0.05, "high": 1, "at_batch": 64},
        "epochs": 1,
    },
    "training": {"evaluations": 1},
    "budget": {"trials": 2, "profile_s": 0},
}

# What macOS does not have.
UNLIKE_LINUX = """
import builtins, io, os, pathlib, sys
del os.sched_getaffinity, os.sched_setaffinity
os.sysconf_names = {name: number for name, number in os.sysconf_names.items() if name != "SC_AVPHYS_PAGES"}
opened, stat = io.open, os.stat
def other(function):
    def called(file, *args, **options):
        if isinstance(file, (str, os.PathLike)) and os.fspath(file).startswith(("/proc", "/sys/fs/cgroup", "/dev/shm")):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(file))
        return function(file, *args, **options)
    return called
builtins.open = io.open = other(opened)
os.stat, os.listdir = other(stat), other(os.listdir)
from bsearch.cli import main
main(sys.argv[1:], prog_name="bsearch")
"""


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump({**STUDY, **changes}))
    return file


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["run", "--serial"],
        pytest.param(["check"], marks=pytest.mark.long),
        ["check", "--machine", "--serial"],
    ],
)
def test_commands_work_without_what_linux_alone_has(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNLIKE_LINUX, *command, str(written(tmp_path))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def bound_to_one_core(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    def bind() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    return subprocess.run(  # this process has no threads that fork
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=bind,
    )


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no process is bound to cores here")
def test_cores_are_those_that_this_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from bsearch.objectives.machine.host import cores_here; print(cores_here())"
    assert bound_to_one_core(["-c", code], tmp_path).stdout.strip() == "1"
    for limits, cores in ([["max", "100000"]], 64), ([["150000", "100000"]], 1), ([["50000", "100000"]], 1):
        monkeypatch.setattr(host, "bound_cores", lambda: 64)
        monkeypatch.setattr(host, "cgroup_limit", lambda file, limits=limits: limits)
        assert host.cores_here() == cores
    monkeypatch.setattr(host, "cgroup_limit", lambda file: [["max"], ["1000000"]])
    assert host.host_bytes() == 1_000_000


@pytest.mark.ray
@pytest.mark.long
def test_a_gpu_that_only_ray_counts_ends_no_run(tmp_path: Path) -> None:
    """Beside a torch without CUDA, an old driver, another maker's card."""
    command = [sys.executable, "-m", "bsearch", "run", "--json", str(written(tmp_path))]
    variables = {**os.environ, "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": 1})}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        "Trials run on the CPU: Ray counts 1 GPU, but torch can use none: no driver for one was found."
        in done.stderr
    )
    assert len(json.loads(done.stdout)["front"]) >= 1


@pytest.mark.ray
@pytest.mark.long
def test_a_run_on_one_core_of_several_has_one(tmp_path: Path) -> None:
    done = bound_to_one_core(["-m", "bsearch", "run", "--json", str(written(tmp_path))], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 at once" in done.stderr or "2 of 2 trials" in done.stdout or json.loads(done.stdout)["front"]
