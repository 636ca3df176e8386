"""Studies side by side on one Ray: each has its share of the devices, and what the others leave free besides.

Ray gives devices to whoever asked first, and a study keeps the processes that it has. Drivers of studies therefore write in
Ray's own store that they are there, and each looks who else is: while another one waits for devices that could be its share, a
study that has more than its own returns what its trials leave. Trials are never ended for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from . import ray_variables  # noqa: F401  # before Ray is imported

# isort: split

import ray
from ray._private import worker as ray_worker

# Keys of that store: drivers that are there, and those that wait for a device to profile on.
_NAMESPACE, _STUDY, _PROFILES = b"bsearch", "study:", "profiles:"
# Ray's resource for a kind of accelerator.
KIND = "accelerator_type:"
# How long Ray's head may take to answer: Tune waits meanwhile.
_ASKED_S = 2.0


@dataclass(frozen=True)
class Others:
    """What a study has to know of the others on its Ray.

    Attributes:
        studies: how many studies there are, this one included.
        place: of this one among them, from 0, in order of arrival.
        pending: what each trial of another study needs that waits for devices.
        profiles: another study waits for a device to profile on, or profiles.
        total: all resources of the cluster.
        free: what nobody holds of each machine's resources, by the machine's id.
    """

    studies: int
    place: int
    pending: Sequence[Mapping[str, float]] = ()
    profiles: bool = False
    total: Mapping[str, float] | None = None
    free: Mapping[str, Mapping[str, float]] | None = None

    def wait(self, needed: Mapping[str, float]) -> bool:
        """Whether another study waits for devices like this one's that would be within its share.

        Args:
            needed: resources of one of this study's devices.

        >>> two = Others(studies=2, place=0, pending=[{"CPU": 3}], total={"CPU": 4})
        >>> two.wait({"CPU": 1}), Others(2, 0, pending=[{"CPU": 2}], total={"CPU": 4}).wait({"CPU": 1})
        (False, True)
        """
        counted = "GPU" if "GPU" in needed else "CPU"
        fair = (self.total or {}).get(counted, 0.0) / self.studies
        kind = {name for name in needed if name.startswith(KIND)}

        def could_have(wanted: Mapping[str, float]) -> bool:
            other_kind = kind and any(name.startswith(KIND) and name not in kind for name in wanted)
            return 0 < wanted.get(counted, 0.0) <= fair + 1e-6 and not other_kind

        return self.profiles or any(map(could_have, self.pending))

    def share(self, fit: int, held: int, free: int, *, wait: bool) -> int:
        """Devices that this study may hold.

        Args:
            fit: devices of the cluster.
            held: devices that it holds.
            free: devices that nobody holds.
            wait: whether another study waits for some.

        >>> two = Others(studies=2, place=0)
        >>> two.share(8, held=8, free=0, wait=True), two.share(5, held=0, free=0, wait=True)
        (4, 3)
        >>> two.share(8, held=4, free=2, wait=False), Others(3, 2).share(2, held=0, free=0, wait=True)
        (6, 0)
        """
        fair = fit // self.studies + (self.place < fit % self.studies)
        return fair if wait else min(fit, max(fair, held + free))


def _client() -> Any:
    return getattr(ray_worker.global_worker, "gcs_client", None)


def _own_job() -> str:
    return str(ray.get_runtime_context().get_job_id())


def arrive() -> None:
    """Register this study with the others on this Ray; without effect if Ray's store cannot be written."""
    with suppress(Exception):
        _client().internal_kv_put(f"{_STUDY}{_own_job()}".encode(), b"", True, _NAMESPACE, _ASKED_S)


def depart() -> None:
    """Unregister this study, since its process may stay connected."""
    with suppress(Exception):
        _client().internal_kv_del(f"{_STUDY}{_own_job()}".encode(), False, _NAMESPACE, _ASKED_S)


@contextmanager
def profiling() -> Iterator[None]:
    """Context in which this study wants a device to profile on: Ray tells nobody of a task that waits for one machine."""
    key = f"{_PROFILES}{_own_job()}".encode()
    with suppress(Exception):
        _client().internal_kv_put(key, b"", True, _NAMESPACE, _ASKED_S)
    try:
        yield
    finally:
        with suppress(Exception):
            _client().internal_kv_del(key, False, _NAMESPACE, _ASKED_S)


def other_studies() -> Others | None:
    """The others on the Ray that this process is connected to; None where there are none.

    Raises:
        ConnectionError: Ray's head does not say.
    """
    try:
        return _others(_client(), _own_job())
    except Exception as error:  # these are Ray's internals
        logging.getLogger("ray").warning("which other studies use this Ray is not known: %s", error)
        raise ConnectionError(f"Ray's head does not say who uses it: {error}") from None


def _others(client: Any, own: str) -> Others | None:
    marked = {key.decode().removeprefix(_STUDY) for key in client.internal_kv_keys(_STUDY.encode(), _NAMESPACE, _ASKED_S)}
    if marked <= {own}:
        return None
    jobs = client.get_all_job_info(skip_submission_job_info_field=True, skip_is_running_tasks_field=True, timeout=_ASKED_S)
    alive = {job.hex() for job, of in jobs.items() if not of.is_dead}
    # Job numbers are little-endian.
    studies = sorted({own} | (marked & alive), key=lambda job: bytes.fromhex(job)[::-1])
    if len(studies) == 1:
        return None
    from ray.core.generated import autoscaler_pb2

    reply: Any = autoscaler_pb2.__dict__["GetClusterResourceStateReply"]()  # without a stub
    reply.ParseFromString(client.get_cluster_resource_state(timeout_s=_ASKED_S))
    state = reply.cluster_resource_state
    others = set(studies) - {own}
    pending = []
    for group in state.pending_gang_resource_requests:
        job = group.details.partition(":")[0][-len(own) :]  # a placement group's id ends with its job's
        if job in others:
            pending.append(_summed(request.resources_bundle for request in group.requests))
    keys = client.internal_kv_keys(_PROFILES.encode(), _NAMESPACE, _ASKED_S)
    return Others(
        len(studies),
        studies.index(own),
        pending,
        not others.isdisjoint(key.decode().removeprefix(_PROFILES) for key in keys),
        _summed(node.total_resources for node in state.node_states),
        {node.node_id.hex(): dict(node.available_resources) for node in state.node_states},
    )


def _summed(each: Any) -> dict[str, float]:
    total: dict[str, float] = {}
    for resources in each:
        for name, amount in resources.items():
            total[name] = total.get(name, 0.0) + amount
    return total
