"""Studies side by side on one Ray: each has its share of the devices, and what the others leave free besides.

Ray gives devices to whoever asked first, and a study keeps the processes that it has. Drivers of studies therefore tell Ray
what they are, and each looks who else is there: while another one waits for devices, a study that has more than its share
returns what its trials leave. Trials are never ended for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from . import ray_variables  # noqa: F401  # before Ray is imported

# isort: split

import ray
from ray._private import worker as ray_worker
from ray.job_config import JobConfig

# How drivers of studies are known among Ray's jobs.
_MARK = "bsearch"
# Where a driver writes in Ray's own store that it waits for a device.
_NAMESPACE, _WAITS = b"bsearch", "waits:"
# How long Ray's head may take to answer.
_ASKED_S = 10.0


@dataclass(frozen=True)
class Others:
    """What a study has to know of the others on its Ray.

    Attributes:
        studies: how many studies there are, this one included.
        place: of this one among them, from 0, in the order in which they came.
        wait: whether something of another's waits for devices.
        free: what nobody holds of each machine's resources, by the machine's id.
    """

    studies: int
    place: int
    wait: bool
    free: Mapping[str, Mapping[str, float]]

    def share(self, fit: int, held: int, free: int) -> int:
        """Trials that this study may hold devices for, at least one.

        Args:
            fit: trials that all devices of the cluster have room for.
            held: trials that it holds devices for.
            free: trials that the free devices have room for.

        >>> two = Others(studies=2, place=0, wait=True, free={})
        >>> two.share(8, held=8, free=0), two.share(5, held=0, free=0), two.share(1, held=1, free=0)
        (4, 3, 1)
        >>> Others(studies=2, place=0, wait=False, free={}).share(8, held=4, free=2)
        6
        """
        fair = max(fit // self.studies + (self.place < fit % self.studies), 1)
        return fair if self.wait else max(fair, held + free)


def of_a_study() -> JobConfig:
    """What a study's driver joins Ray with, so that others know it."""
    return JobConfig(metadata={_MARK: "study"})


@contextmanager
def waiting() -> Iterator[None]:
    """Context in which this study wants a device for a single task: Ray does not name such tasks to others where they wait for
    one machine.
    """
    client: Any = getattr(ray_worker.global_worker, "gcs_client", None)
    key = f"{_WAITS}{ray.get_runtime_context().get_job_id()}".encode()
    with suppress(Exception):  # the others do not hear of it
        client.internal_kv_put(key, b"", True, _NAMESPACE, _ASKED_S)
    try:
        yield
    finally:
        with suppress(Exception):
            client.internal_kv_del(key, False, _NAMESPACE, _ASKED_S)


def other_studies() -> Others | None:
    """The others on the Ray that this process is connected to; None where there are none, or this Ray does not say.

    Raises:
        ConnectionError: its head does not answer.
    """
    client: Any = getattr(ray_worker.global_worker, "gcs_client", None)
    if not hasattr(client, "get_all_job_info") or not hasattr(client, "get_cluster_resource_state"):
        return None
    try:
        from ray.core.generated import autoscaler_pb2

        waiting = client.internal_kv_keys(_WAITS.encode(), _NAMESPACE, _ASKED_S)
        jobs = client.get_all_job_info(skip_submission_job_info_field=True, skip_is_running_tasks_field=True, timeout=_ASKED_S)
        own = ray.get_runtime_context().get_job_id()
        studies = sorted({own, *(job.hex() for job, of in jobs.items() if not of.is_dead and _MARK in of.config.metadata)})
        if len(studies) == 1:
            return None
        reply: Any = autoscaler_pb2.__dict__["GetClusterResourceStateReply"]()  # without a stub
        reply.ParseFromString(client.get_cluster_resource_state(timeout_s=_ASKED_S))
    except (ImportError, KeyError):
        return None
    except Exception as error:
        raise ConnectionError(f"Ray's head does not say who uses it: {error}") from None
    state = reply.cluster_resource_state
    # A placement group's id ends with its job's.
    groups = [one.details.partition(":")[0] for one in state.pending_gang_resource_requests]
    others = {f"{_WAITS}{job}".encode() for job in studies if job != own}
    return Others(
        len(studies),
        studies.index(own),
        any(not group.endswith(own) for group in groups) or not others.isdisjoint(waiting),
        {node.node_id.hex(): dict(node.available_resources) for node in state.node_states},
    )


__all__ = ["Others", "of_a_study", "other_studies", "waiting"]
