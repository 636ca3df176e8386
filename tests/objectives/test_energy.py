"""Energy: counters, power at several micro-batches, and a study whose front is of energy."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from bsearch.cli import main
from bsearch.objectives.machine import energy
from bsearch.objectives.profiling import power
from bsearch.objectives.profiling.fit import fit_step_time
from bsearch.objectives.profiling.power import PowerReading
from bsearch.objectives.task_code import task_code_hash
from bsearch.search.run.driver import run_study
from bsearch.search.run.serial import SerialRunner
from bsearch.spaces.errors import BsearchError, ProfilingError
from bsearch.spaces.laws.step_time import StepTime, TimedPlan, timing_plans
from bsearch.spaces.plan import BatchPlan, Embedding
from bsearch.spaces.study.file import read_study
from click.testing import CliRunner
from embedding_tasks import Metered
from helpers import SPACE, setup
from hypothesis import given
from hypothesis import strategies as st

_RANGE_J = 30.0


@contextlib.contextmanager
def processor(folder: Path, idle_w: float, busy_w: float) -> Iterator[None]:
    """Files as of a processor that draws so much, and more for each core that this process keeps busy; soon begun again."""
    zone, over = folder / "intel-rapl:0", threading.Event()
    (zone / "intel-rapl:0:0").mkdir(parents=True)
    for name, value in {"name": "package-0", "energy_uj": "0", "max_energy_range_uj": f"{_RANGE_J * 1e6:.0f}"}.items():
        (zone / name).write_text(value)
    (zone / "intel-rapl:0:0" / "energy_uj").write_text("a part of it, which would count twice")
    started, cpu_before = time.perf_counter(), time.process_time()

    def count() -> None:
        while not over.wait(0.01):
            joules = idle_w * (time.perf_counter() - started) + busy_w * (time.process_time() - cpu_before)
            new = zone / "new"
            new.write_text(f"{joules % _RANGE_J * 1e6:.0f}")
            new.replace(zone / "energy_uj")

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def test_power_is_read_between_moves_of_a_counter_that_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    # It begins again after 0.3 s.
    with processor(tmp_path, idle_w=100.0, busy_w=0.0), PowerReading(energy.EnergyCounter("cpu")) as reading:
        time.sleep(1.0)
    assert reading.watts == pytest.approx(100.0, rel=0.1)


def test_a_device_without_a_counter_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    with pytest.raises(ProfilingError, match=f"this CPU has no readable energy counter: none in {tmp_path}"):
        energy.EnergyCounter("cpu")
    assert energy.counter_of("cpu") is None


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(1, 1000)), min_size=1, unique_by=lambda point: point[0]))
def test_power_lies_between_that_of_the_sizes_around(points: list[tuple[int, float]]) -> None:
    power = tuple(sorted(points))
    law = StepTime(((1, 1.0), (4096, 1.0)), update_s=0.0, power=power)
    for size in {1, 2, 77, 4096, *(size for size, _ in power)}:
        watts = law.watts(BatchPlan(size))
        assert watts is not None
        below = [one for one in power if one[0] <= size][-1:] or [power[0]]
        above = [one for one in power if one[0] >= size][:1] or [power[-1]]
        low, high = sorted((below[0][1], above[0][1]))
        assert low - 1e-9 <= watts <= high + 1e-9
        if size in dict(power):
            assert watts == pytest.approx(dict(power)[size])
    assert StepTime.from_dict(law.to_dict()) == law


def test_a_study_without_a_counter_refuses_energy(
    study_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    spec = read_study(
        study_file(objectives={"speed": "train_s", "second_speed": "energy_j"}, budget={"trials": 3, "profile_s": 0.3})
    )
    with pytest.raises(BsearchError, match=r"objectives.second_speed: expected a device whose energy can be read, .*none in"):
        run_study(spec, SerialRunner(spec.devices), task_code_hash(spec.task))


class Nvml(ModuleType):
    """NVML with one GPU, as far as it is used here: no machine of ours has one."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.started = time.perf_counter()

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-11-22"
        return "first"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return int((time.perf_counter() - self.started) / 0.05) * 50 * 300  # mJ at 300 W; moves on every 50 ms


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvml]:
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="11-22"))
    energy._gpu_counter.cache_clear()
    yield found
    energy._gpu_counter.cache_clear()


def test_a_gpus_power_is_read_from_its_counter(nvml: Nvml) -> None:
    with PowerReading(energy.EnergyCounter("gpu")) as reading:
        time.sleep(0.8)
    assert reading.watts == pytest.approx(300.0, rel=0.1)


def test_a_counter_that_stands_still_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    with processor(tmp_path, idle_w=0.0, busy_w=0.0), PowerReading(energy.EnergyCounter("cpu")) as reading:
        time.sleep(0.1)
    with pytest.raises(ProfilingError, match=r"its energy counter changed 0 times in .* s of training"):
        _ = reading.watts


@given(
    smallest=st.integers(1, 4),
    factor=st.integers(1, 500),
    devices=st.integers(1, 4),
    dense=st.booleans(),
    embedding=st.sampled_from(["", "whole", "cached"]),
)
def test_power_is_read_under_plans_that_were_timed(
    smallest: int, factor: int, devices: int, dense: bool, embedding: Embedding
) -> None:
    """So that they fit, take a known time, and compute what the trials of the law do."""
    highest = smallest * factor
    timed = timing_plans(smallest, highest, devices=devices, dense=dense, activation_checkpointing="full", embedding=embedding)
    plans = power.power_plans(timed)
    sizes = [plan.largest_micro_batch for plan in plans]
    assert set(plans) <= set(timed)
    assert {plan.accumulation for plan in plans} == {2 if embedding == "cached" else 1}
    assert sizes == sorted(set(sizes)) and {smallest, highest} <= set(sizes) and len(sizes) <= 6


@pytest.mark.parametrize(("embedding", "passes_j", "passes_s"), [("whole", 1.0, 1e-3), ("cached", 4.0, 2e-3)])
def test_energy_of_a_loss_over_embeddings_is_that_of_all_its_passes(
    embedding: Embedding, passes_j: float, passes_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joules of a step, which is its known time at its power, are those of every forward pass that it takes."""

    class Meter:
        def __init__(self, counter: None) -> None: ...

        def __enter__(self) -> Meter:
            self.before = Metered.seconds, Metered.joules
            return self

        def __exit__(self, *error: object) -> None:
            seconds, joules = self.before
            self.watts = (Metered.joules - joules) / (Metered.seconds - seconds)

    monkeypatch.setattr(power, "PowerReading", Meter)
    monkeypatch.setattr(power, "EnergyCounter", lambda kind: None)
    for name in ("_SETTLING_S", "_READING_S"):
        monkeypatch.setattr(power, name, 0.05)
    timed = timing_plans(2, 16, embedding=embedding)
    times = [sum(plan.micro_batches()) * passes_s for plan in timed]
    law = fit_step_time([TimedPlan(plan, (step_s,)) for plan, step_s in zip(timed, times, strict=True)])
    law = power.with_power("embedding_tasks:Metered", setup(4), replace(law, embedding=embedding))
    parts = (2, 3, 7) if embedding == "cached" else (1,)
    for plan in (BatchPlan(size * count, count) for size in (2, 5, 16) for count in parts):
        watts = law.watts(plan)
        assert watts is not None
        assert watts * law.step_s(plan) == pytest.approx(passes_j * plan.effective_batch, rel=1e-6)


@pytest.mark.long
@pytest.mark.slow
def test_a_front_of_time_energy_and_accuracy(
    study_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "powercap")
    for name in ("_SETTLING_S", "_READING_S"):
        monkeypatch.setattr(power, name, 0.2)
    path = study_file(
        task="bsearch.objectives.digits:Digits",
        space=SPACE | {"epochs": {"low": 1, "high": 4}},
        objectives={"speed": "train_s", "second_speed": "energy_j"},
        budget={"trials": 9, "profile_s": 1},
    )
    spec = read_study(path)
    with pytest.raises(BsearchError, match=r"objectives\.second_speed: expected a device whose energy"):
        run_study(spec, SerialRunner(spec.devices), task_code_hash(spec.task))
    measured = tmp_path / "here.json"
    with processor(tmp_path / "powercap", idle_w=10.0, busy_w=20.0):
        result = run_study(spec, SerialRunner(spec.devices), task_code_hash(spec.task))
        told = CliRunner().invoke(main, ["profile", str(path), "--out", str(measured)])
    assert told.exit_code == 0, told.output
    assert "Power while it trains: " in told.output
    ended = [one for one in result.study.records if one.outcome == "complete"]
    assert len(ended) >= 5
    for record in ended:
        assert record.train_s is not None and record.facts.watts is not None
        assert 10 < record.facts.watts < 52  # of two busy cores at most
        assert record.taken("energy_j") == pytest.approx(record.train_s * record.facts.watts)
    assert result.study.front.second_speed == "energy_j"
    # The same device under a limit: slower, and less energy.
    document = json.loads(measured.read_text())
    for profile in document["profiles"]:
        for law in profile["profile"]["step_times"]:
            law["points"] = [[size, 1.2 * seconds] for size, seconds in law["points"]]
            law["power"] = [[size, 0.6 * watts] for size, watts in law["power"]]
    limited = tmp_path / "limited.json"
    limited.write_text(json.dumps({**document, "device": "limited"}))
    there, here = (
        {one["trial"]: one["energy_j"] for one in json.loads(CliRunner().invoke(main, arguments).output)["front"]}
        for file in (limited, measured)
        for arguments in [["retime", str(path), "--profile", str(file), "--json"]]
    )
    assert there.keys() & here.keys()
    assert all(there[trial] == pytest.approx(0.72 * here[trial], rel=0.1) for trial in there.keys() & here.keys())
