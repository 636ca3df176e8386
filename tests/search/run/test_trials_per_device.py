"""`devices.per_trial: auto`: how many trials share a GPU is measured once, stored, and resolved for what follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest
from bsearch.search.run.profiles import with_trials_per_device
from bsearch.search.store.tables import Tables
from bsearch.spaces.laws.device import DeviceProfile, ProfileRequest
from bsearch.spaces.study.devices import Devices
from bsearch.spaces.study.file import read_study

StudyFile = Callable[..., Path]


class Gpus:
    """As much of a Runner as is asked here: GPUs on which two trainings train considerably more, and four do not."""

    device: Literal["cpu", "gpu"] = "gpu"
    shares_devices, kinds, cores = True, ("A100", "L4"), 8

    def __init__(self) -> None:
        self.asked: list[tuple[str, ProfileRequest]] = []

    def device_id(self, kind: str = "") -> str:
        return kind

    def use(self, devices: Devices) -> None:
        assert devices.share == 0.5

    def profile(self, reference: str, request: ProfileRequest, kind: str = "") -> DeviceProfile:
        self.asked.append((kind, request))
        return DeviceProfile("gpu", kind, 400, sharing=((1, 100.0), (2, 190.0), (4, 200.0)))


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[Tables]:
    with closing(Tables(f"sqlite:///{tmp_path / 'study.db'}")) as tables:
        yield tables


def resolved(path: Path, runner: Any, tables: Tables) -> tuple[float, list[str]]:
    said: list[str] = []
    spec = with_trials_per_device(read_study(path), runner, "hash", tables, said.append)
    assert not spec.devices.auto_share and spec.devices.counts == (1,)
    return spec.devices.share, said


def test_it_is_measured_once_and_stored(study_file: StudyFile, tables: Tables) -> None:
    path, gpus = study_file(devices={"per_trial": "auto", "kind": "gpu"}), Gpus()
    share, said = resolved(path, gpus, tables)
    assert share == 0.5
    assert said[-1] == "devices.per_trial: auto: 2 trials on each GPU (samples per second: 100 with 1, 190 with 2, 200 with 4)"
    (kind, request), *_ = gpus.asked
    # Alone on the GPU, with all of its cores, and a batch from the middle of the space.
    assert (kind, request.share, request.setup.cpus, request.timing_s) == ("A100", 1.0, 8, 0.0)
    assert request.shared_batch == round((16 * 400) ** 0.5)
    assert ProfileRequest.from_dict(request.to_dict()) == request
    assert resolved(path, gpus, tables)[0] == 0.5
    assert len(gpus.asked) == 1


@pytest.mark.parametrize("how", ["cpu", "serial"])
def test_a_device_of_their_own_where_trials_cannot_share_one(study_file: StudyFile, tables: Tables, how: str) -> None:
    gpus = Gpus()
    if how == "cpu":
        gpus.device = "cpu"
    else:
        gpus.shares_devices = False
    assert resolved(study_file(devices={"per_trial": "auto"}), gpus, tables) == (1.0, [])
    assert not gpus.asked
