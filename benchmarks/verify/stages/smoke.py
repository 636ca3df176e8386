"""The first stage: whether bsearch works on this device at all, within half a minute."""

from __future__ import annotations

import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import nn

from ....objectives.machine import accelerator
from ....objectives.machine.device_memory import (
    EXPANDABLE_SEGMENTS,
    allocator_segments,
    is_out_of_memory,
    limit_memory,
    process_fault,
    release_memory,
    segments_grow,
)
from ....objectives.machine.gpus import asked_here
from ....objectives.machine.host import cores_here, host_bytes
from ....objectives.machine.nvidia import nvidia_smi
from ....objectives.profiling.memory.live_bytes import LiveBytes
from ....objectives.training import TrainingRun
from ....spaces.plan import BatchPlan
from ..claims import Claim, Data, Fact
from ..stage import Found, Stage
from .tasks import IMAGES, TINY_GPT, TOKENS, setup_of, task_of
from .training import train_loss

_MIB = 1 << 20
# A net with BatchNorm.
_NET = {"model": "small_cnn", "image_size": 16, "samples": 64}
# The cap that is tried, and a request over it.
_CAP, _OVER = 64 * _MIB, 128 * _MIB

# What it found, in words; any exception is a failure.
Check = Callable[[], str]


def smoke(stage: Stage) -> Iterator[Found]:
    """Run every check that applies to the device, until one leaves it unusable."""
    failures: list[str] = []
    count = 0
    for name, check in checks_of(stage.device).items():
        count += 1
        try:
            said = check()
        except Exception as error:
            traceback.print_exc()
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            failures.append(f"{name}: {said}")
            said = f"failed: {said}"
        yield Fact(name, said)
        if failures and process_fault(stage.device):
            break
    if stage.device == "gpu" and not failures and accelerator.backend() == "cuda":
        yield Data("segments", "after the checks", {"segments": allocator_segments()})
    note = failures[0] if failures else ""
    yield Claim("checks that fail", 0, float(len(failures)), unit="", cases=count, note=note)


def checks_of(device: Literal["cpu", "gpu"]) -> dict[str, Check]:
    """The checks for a kind of device, by name."""
    gpu = device == "gpu"
    checks: dict[str, Check] = {"GPUs": _usable} if gpu else {}
    checks["allocation"] = partial(_allocated, device)
    if gpu and accelerator.backend() == "cuda":
        checks["expandable segments"] = _segments_grow
    checks["memory cap"] = _capped_gpu if gpu else _capped_cpu
    for precision in ("bf16", "fp16"):
        checks[f"training step in {precision}"] = partial(_stepped, device, precision)
    if accelerator.pins(accelerator.device_of(device)):
        checks["page-locked copy"] = _copied
    if (accelerator.device_count() if gpu else cores_here()) > 1:
        checks["training on two GPUs" if gpu else "training in two processes"] = partial(_two_ranks, device)
    return checks


def _usable() -> str:
    usable, count = asked_here(tries=True), accelerator.device_count()
    if not count or usable.count != count:
        raise RuntimeError(usable.reason or f"torch counts {count}, but can use {usable.count}")
    said = f"{count} usable: {', '.join(dict.fromkeys(gpu.name for gpu in usable.gpus))}"
    with suppress(OSError, subprocess.SubprocessError):
        # Another number is no failure: slices of a card, for one, are not listed.
        said += f"; nvidia-smi lists {len(nvidia_smi('name'))}"
    return said


def _allocated(device: Literal["cpu", "gpu"]) -> str:
    free = accelerator.memory_info()[0] if device == "gpu" else host_bytes()
    size = min(free // 4, 256 * _MIB)
    total = int(torch.ones(size, dtype=torch.uint8, device=accelerator.device_of(device)).sum())
    if total != size:
        raise RuntimeError(f"{size} bytes of 1 sum to {total}")
    return f"{size // _MIB} MiB written and read"


def _segments_grow() -> str:
    if segments_grow():
        return "on"
    return f"{'asked for, but off' if EXPANDABLE_SEGMENTS else 'off'}: steps reserve 5 to 20 % more"


def _capped_gpu() -> str:
    device = accelerator.device_of("gpu")
    if not hasattr(accelerator._module(), "set_per_process_memory_fraction"):
        return "none: torch has no such limit for this accelerator; a trial may take more than it was given"
    release_memory("gpu")
    limit_memory(accelerator.reserved_bytes() + _CAP, device)
    try:
        refused = _refused(device)
    finally:
        limit_memory(None, device)
    return _cap_verdict(refused, _refused(device))


def _capped_cpu() -> str:
    model = nn.Linear(1, 1)
    with LiveBytes(_CAP).counting(model, torch.optim.SGD(model.parameters())):
        refused = _refused(torch.device("cpu"))
    return _cap_verdict(refused, _refused(torch.device("cpu")))


def _refused(device: torch.device) -> bool:
    try:
        torch.empty(_OVER, dtype=torch.uint8, device=device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return True
    return False


def _cap_verdict(refused: bool, refused_later: bool) -> str:
    if not refused:
        raise RuntimeError(f"{_OVER // _MIB} MiB were allocated under a cap of {_CAP // _MIB}")
    if refused_later:
        raise RuntimeError(f"{_OVER // _MIB} MiB were refused after the cap was lifted")
    return f"{_OVER // _MIB} MiB refused under {_CAP // _MIB}, and allocated after it"


def _stepped(device: str, precision: str) -> str:
    plan = BatchPlan(32)
    run = TrainingRun(task_of(IMAGES), setup_of(plan, device, _NET, precision=precision))
    run.model.train()
    loss = run.step(run.micro_batches(plan, run.loader([plan])), plan.effective_batch)
    if not all(bool(tensor.isfinite().all()) for tensor in (loss, *run.parameters)):
        raise RuntimeError(f"the loss or the weights are not finite: loss {float(loss):g}")
    scaled = f", scaled by {run.scaler.get_scale():g}" if run.scaler.is_enabled() else ""
    return f"loss {float(loss):.3f}{scaled}"


def _copied() -> str:
    host = torch.arange(_MIB).pin_memory()
    there = host.to(accelerator.device_of("gpu"), non_blocking=True)
    accelerator.synchronize()
    if not host.is_pinned() or not torch.equal(there.cpu(), host):
        raise RuntimeError(f"{host.nbytes // _MIB} MiB came back changed")
    return f"{host.nbytes // _MIB} MiB there and back"


def _two_ranks(device: str) -> str:
    setup = replace(setup_of(BatchPlan(33), device, TINY_GPT), samples_budget=128)
    alone, both = (
        train_loss(TOKENS, setup),
        train_loss(TOKENS, replace(setup, plan=BatchPlan(33, devices=2))),
    )
    if not abs(both / alone - 1) < 1e-3:
        raise RuntimeError(f"loss {both:g}, on one {alone:g}")
    return f"loss {both:.3f}, the same as on one"
