"""How many trials share a GPU: real trainings side by side, on a CPU whose cores and memory stand in for the device's."""

from __future__ import annotations

import pytest
from bsearch.objectives.profiling import sharing
from bsearch.objectives.profiling.sharing import side_by_side, with_sharing
from bsearch.spaces.errors import ProfilingError
from bsearch.spaces.laws.device import SHARING_PAYS, DeviceProfile, ProfileRequest
from bsearch.spaces.laws.memory import MemoryLaw
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.devices import Memory
from conftest import TASKS
from helpers import setup
from hypothesis import given
from hypothesis import strategies as st

POINTS = f"{TASKS}:Points"


@given(st.lists(st.floats(0.3, 3.0), max_size=3))
def test_twice_as_many_trials_run_as_long_as_that_pays(factors: list[float]) -> None:
    rates = [100.0]
    for factor in factors:
        rates.append(rates[-1] * factor)
    profile = DeviceProfile("gpu", "", None, sharing=tuple((2**index, rate) for index, rate in enumerate(rates)))
    slow_twin = 1
    for factor in factors:
        if 100 * factor < 100 * SHARING_PAYS:
            break
        slow_twin *= 2
    assert profile.trials_per_device == slow_twin


def test_own_loops_and_studies_that_do_not_ask_are_not_measured() -> None:
    profile = DeviceProfile("gpu", "", 400)
    assert with_sharing(POINTS, profile, ProfileRequest(setup(), Memory(), 100), int) is profile
    loop = ProfileRequest(setup(), Memory(), 100, shared_batch=20)
    assert with_sharing(f"{TASKS}:own_loop", profile, loop, int).trials_per_device == 1


@pytest.mark.long
def test_trainings_side_by_side_have_their_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_MEASURED_S", 0.3)
    monkeypatch.setattr("bsearch.spaces.laws.device.SHARING_PAYS", 0.0)
    monkeypatch.setattr(sharing, "SHARING_PAYS", 0.0)
    request = ProfileRequest(setup(cpus=2), Memory(), 100, shared_batch=50)
    profile = with_sharing(POINTS, DeviceProfile("cpu", "", 400), request, lambda share: int(1e9 * share))
    assert [trials for trials, _ in profile.sharing] == [1, 2]  # no more than cores
    assert all(rate > 0 for _, rate in profile.sharing)
    # Where half of the memory holds fewer samples than the batch has, its steps would be others.
    law = MemoryLaw(((1, 1000), (100, 100_000)))
    limited = DeviceProfile("gpu", "", 400, memory=law)
    monkeypatch.setattr(sharing, "side_by_side", lambda reference, setup, trials, seconds: 1.0)
    tight = with_sharing(POINTS, limited, request, lambda share: int(80_000 * share))
    assert [trials for trials, _ in tight.sharing] == [1]
    roomy = with_sharing(POINTS, limited, request, lambda share: int(120_000 * share))
    assert [trials for trials, _ in roomy.sharing] == [1, 2]


@pytest.mark.long
@pytest.mark.slow
def test_one_that_fails_or_runs_out_of_memory_ends_the_others() -> None:
    with pytest.raises(ProfilingError, match="a training beside others failed: RuntimeError: words never heard before"):
        side_by_side(f"{TASKS}:RaisesForSome", setup(plan=BatchPlan(8), samples_budget=400), 2, 0.1)
    assert side_by_side(f"{TASKS}:SmallMemory", setup(plan=BatchPlan(60), samples_budget=400), 2, 0.1) is None
