"""What runs the user's code, as the driver and Ray's workers see it: attempts and profiles, in processes that end with them.

Whatever the code changes in its process, or however it ends it, the next does not know. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import cache

from ..spaces.errors import BsearchError, ProfilingError
from ..spaces.laws.device import DeviceProfile, ProfileRequest
from ..spaces.trial import LEFT, NODE_DIED, Measurement, Outcome, TrialSetup
from .parallel.meeting import RankDiedError, warm
from .parallel.rank_processes import ask_ranks_to_leave, over_ranks, shares_of
from .state.leaving import Leaving, ask_to_leave, stay

_ATTEMPT, _TAKES_RANKS = f"{__package__}.trial:attempt_in_rank", f"{__package__}.trial:takes_ranks"
_PROFILE = f"{__package__}.profiling.task_profile:profile_in_rank"


def leave() -> None:
    """Ask the trainings that this process has started to write a checkpoint and end; may be called in a signal handler."""
    ask_to_leave()
    ask_ranks_to_leave()


def start_attempt(reference: str, setup: TrialSetup) -> Iterator[Measurement | Outcome]:
    """Run the training code named by `reference`; the last value yielded is the attempt's Outcome.

    Closing the iterator stops the trial: the user's generator gets GeneratorExit and can clean up.
    """
    devices, kind, cpus = setup.plan.devices, setup.device, setup.cpus
    warm(reference, cpus)
    try:
        if devices > 1 and not _takes_ranks(reference, cpus):
            devices = 1
        with closing(over_ranks(devices, kind, cpus, _ATTEMPT, reference, setup.to_dict())) as reports:  # type: ignore[type-var]
            yield from reports
    except Leaving:
        yield Outcome("interrupted", LEFT)
    except RankDiedError as error:
        message = f"{NODE_DIED}: {error}" if error.machine else str(error)
        yield Outcome("interrupted", message, error.words)
    except BsearchError as error:
        yield Outcome("error", str(error))
    except OSError as error:  # of this machine: no memory, processes or descriptors are left
        yield Outcome("interrupted", f"its process could not be started: {error}")
    finally:
        stay()


@cache
def _takes_ranks(reference: str, cpus: int) -> bool:
    """Whether a training on several devices is a process for each of them, rather than one that has them all."""
    (found,) = over_ranks(1, "cpu", cpus, _TAKES_RANKS, reference)
    return bool(found)


def profiled(reference: str, request: ProfileRequest) -> DeviceProfile:
    """The task's profile on this machine's device.

    Raises:
        TaskError: the code cannot be loaded, breaks its contract, raises, or its loss is not finite.
        StudyFileError: not even the smallest micro-batch fits the memory limit.
        ProfilingError: the device fails, or the process died.
    """
    setup = request.setup
    several = [devices for devices in request.devices if devices > 1]
    if several and setup.device == "gpu":
        from .machine.accelerator import device_count

        if (have := device_count()) < (here := shares_of(max(several))[0]):
            raise ProfilingError(f"devices.per_trial: expected {here} GPUs here, got {have}")
    warm(reference, setup.cpus)
    try:
        (found,) = over_ranks(1, setup.device, setup.cpus, _PROFILE, reference, request.to_dict())
    except (RankDiedError, OSError) as error:
        raise ProfilingError(f"profiling the task: {error}") from None
    profile = DeviceProfile.from_dict(found)
    if not several or not profile.timing_s:
        return profile
    from .profiling.step_time import with_step_times

    return with_step_times(reference, profile, request, several)
