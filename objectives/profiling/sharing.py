"""How many trials to run on one GPU: training runs side by side, each with its share of memory and cores, timed together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from threading import BrokenBarrierError
from typing import Any

from ...spaces.errors import ProfilingError
from ...spaces.laws.device import SHARING_PAYS, DeviceProfile, ProfileRequest
from ...spaces.plan import plan_batch
from ...spaces.trial import TrialSetup
from ..loading import load_task
from ..machine import accelerator
from ..machine.device_memory import is_out_of_memory, release_memory
from ..task import Task
from ..training import TrainingRun

# Numbers of trials that are tried, as long as each pays.
_TRIALS = (1, 2, 4, 8)
# How long they train side by side, and the steps between two looks at the clock.
_MEASURED_S, _STEPS = 3.0, 5
# How long processes may take to import torch and build their models.
_READY_S = 300.0


def with_sharing(
    reference: str, profile: DeviceProfile, request: ProfileRequest, bytes_of_share: Callable[[float], int]
) -> DeviceProfile:
    """The profile with the total throughput of 1, 2, 4, ... runs with `request.shared_batch`, as long as each doubling pays.

    Not further than memory allows without more micro-batches a step, nor beyond one core each.

    Args:
        bytes_of_share: what a run may allocate with a share of the device.

    Raises:
        ProfilingError: not even one run trained.
    """
    if not request.shared_batch or not isinstance(load_task(reference), Task):
        return profile
    batch = min(request.shared_batch, profile.training_set or request.shared_batch)
    sharing: list[tuple[int, float]] = []
    plan = None
    for trials in _TRIALS:
        if trials > request.setup.cpus and sharing:
            break
        limit = request.memory.limit_bytes(bytes_of_share(1 / trials), profile.kind)
        shared = replace(profile, limit_bytes=limit)
        largest = None
        if profile.memory is not None and limit is not None:
            largest = profile.memory.largest_micro_batch(shared.usable_bytes(1, request.memory.headroom))
            if largest is None:
                break
        at_this_share = plan_batch(
            batch, largest_micro_batch=largest, smallest_micro_batch=min(profile.smallest_micro_batch, batch)
        )
        plan = plan or at_this_share
        if at_this_share != plan:
            break  # memory, not speed, would be shared: more micro-batches a step, which batch statistics see
        setup = replace(request.setup, plan=plan, cpus=max(request.setup.cpus // trials, 1), memory_limit_bytes=limit)
        release_memory(profile.kind)  # what this process has cached is not theirs to use
        samples_per_s = side_by_side(reference, setup, trials, _MEASURED_S)
        if samples_per_s is None:
            break
        sharing.append((trials, samples_per_s))
        if trials > 1 and samples_per_s < SHARING_PAYS * sharing[-2][1]:
            break
    if not sharing:
        raise ProfilingError("devices.per_trial: auto: no training ran on the device, since its memory is used up")
    return replace(profile, sharing=tuple(sharing))


def side_by_side(reference: str, setup: TrialSetup, trials: int, seconds: float) -> float | None:
    """Total samples per second of several runs with this setup, each in its own process.

    Returns:
        None where one of them ran out of memory or its process died.

    Raises:
        ProfilingError: the training code failed.
    """
    context = get_context("spawn")
    meeting = (context.Barrier(trials),)
    try:
        with ProcessPoolExecutor(trials, mp_context=context, initializer=_keep, initargs=meeting) as processes:
            found = list(processes.map(_trained, *zip(*[(reference, setup, seconds)] * trials, strict=True)))
    except BrokenProcessPool:
        return None
    if failed := next((failure for _, failure in found if failure), ""):
        raise ProfilingError(f"devices.per_trial: auto: a training beside others failed: {failed}")
    rates = [rate for rate, _ in found if rate is not None]
    return sum(rates) if len(rates) == trials else None


# Where the processes of a measurement wait for each other; set in each of them.
_meeting: Any = None


def _keep(meeting: Any) -> None:
    global _meeting
    _meeting = meeting


def _trained(reference: str, setup: TrialSetup, seconds: float) -> tuple[float | None, str]:
    """Samples per second of one run beside others; None and why it failed, which is empty where memory ran out."""
    try:
        task = load_task(reference)
        assert isinstance(task, Task)
        run = TrainingRun(task, setup)
        run.modes.train(run.model)
        run.rates.freeze()
        loader = run.loader(itertools.repeat(setup.plan))

        def steps(count: int) -> None:
            for _ in range(count):
                run.rates.set(0.5)
                run.step(run.micro_batches(setup.plan, loader), setup.plan.effective_batch)
            accelerator.synchronize(run.device)

        steps(_STEPS)
        _meeting.wait(_READY_S)
        started, done = time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - started) < seconds or not done:
            steps(_STEPS)
            done += _STEPS
        return done * setup.plan.effective_batch / elapsed_s, ""
    except BrokenBarrierError:
        return None, ""  # another could not begin
    except Exception as error:
        _meeting.abort()
        return None, "" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
