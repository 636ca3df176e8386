"""Fixtures: study files, the tasks they name, and where the real data lies."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import Phase, settings
from postgres_server import PostgresServer, postgres_server

if TYPE_CHECKING:
    from bsearch.objectives.parallel.rank_processes import RankProcesses

pytest_plugins = ["attacks"]

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test loads from a hub

# A shell starts commands in the background with SIGINT ignored, and what tests start would never hear their Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on the machine's neighbours.
settings.register_profile("bsearch", deadline=None)
# Of a mutant it is enough to know that an example fails, not the smallest one.
settings.register_profile("mutants", deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
# Laws again with other versions of libraries: what depends on them fails at the first examples.
settings.register_profile("few", deadline=None, max_examples=15)
settings.load_profile("bsearch")


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else some libraries take what is frozen for leaked


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Torch and transformers alone are a million objects, and every trial collects garbage as it ends: they are left out."""
    gc.collect()
    gc.freeze()


TASKS = Path(__file__).parent / "tasks_for_tests.py"
BSEARCH = Path(sys.executable).parent / "bsearch"


BATCH_AND_RATE = {
    "effective_batch": {"low": 16, "high": 400},
    "reference_rate": {"low": 0.02, "high": 0.5, "at_batch": 64},
}
BASELINE = {"effective_batch": 64, "reference_rate": 0.1, "rule": "sqrt"}


def small_study(**changes: Any) -> dict[str, Any]:
    """A study on digits that trains in seconds; top-level keys may be replaced or, with None, left out."""
    study: dict[str, Any] = {
        "study": "small",
        "task": "bsearch.objectives.digits:Digits",
        "space": {**BATCH_AND_RATE, "rule": ["linear", "sqrt"], "epochs": 2},
        "training": {"evaluations": 2},
        "budget": {"trials": 4},
        "cluster": {"trials_at_once": 2},
    }
    study.update(changes)
    # Timed by the clock, for steps take seconds to time; tests of known times say otherwise.
    study["budget"] = {"profile_s": 0, **study["budget"]}
    return {key: value for key, value in study.items() if value is not None}


@pytest.fixture
def study_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a study file: `study_file(budget={"trials": 2})` changes keys of a small one."""

    def write(**changes: Any) -> Path:
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(small_study(**changes), sort_keys=False))
        return path

    return write


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a study that has met its budget, run in this process; not to be changed."""
    from helpers import run

    path = tmp_path_factory.mktemp("finished") / "study.yaml"
    study = small_study(task=f"{TASKS}:Points", budget={"trials": 6}, baseline=[BASELINE])
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    assert not run(path).failure
    return path


@pytest.fixture(scope="session")
def cifar_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 as folders of images: 2,000 to train on and 500 to test, unpacked from the real data."""
    folder = os.environ.get("BSEARCH_DATA")
    archive = Path(folder or "") / "cifar10-images.tar.xz"
    if not folder or not archive.is_file():
        pytest.skip("BSEARCH_DATA names no folder with cifar10-images.tar.xz")
    target = tmp_path_factory.mktemp("cifar")
    limits = {"train": 200, "test": 50}
    with tarfile.open(archive) as tar:
        taken: dict[str, int] = {}
        for member in tar:
            parts = Path(member.name).parts
            if not member.isfile() or len(parts) < 3:
                continue
            split, label = parts[-3:-1]
            if taken.get(f"{split}/{label}", 0) < limits.get(split, 0):
                taken[f"{split}/{label}"] = taken.get(f"{split}/{label}", 0) + 1
                member.name = str(Path(split, label, parts[-1]))
                tar.extract(member, target, filter="data")
    return target


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A Ray of two CPUs that all tests of a module use; gone when they end."""
    import ray
    from bsearch.cluster.connection import disconnect, start_local_ray
    from ray._private.authentication_test_utils import reset_auth_token_state

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        reset_auth_token_state()  # Ray reads it once per process, and this one may have used another's
        start_local_ray(1, num_cpus=2)
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            disconnect()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL that all tests of this session share."""
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/small.db"
    return str(request.getfixturevalue("postgres").new_database())


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    """Two processes on CPUs that train together."""
    from bsearch.objectives.parallel.rank_processes import RankProcesses

    started = RankProcesses(2, "cpu", 1)
    yield started
    started.close()
