"""What we change inside Ray Tune: its processes run one attempt after another, it forgets the trials that have ended, and it
ends at once where Ray has died.

A process imports torch for seconds, so an attempt should find one ready. Tune ends those that no trial waits for at the
moment, and those still starting whose trial found another; with trials as short as a start, they are ended as they come up.
It also keeps every trial to the end of its run, for a list of results that nobody reads here; and it waits for a Ray that is
gone, or lets it end the whole process.

These are Tune's internals, which its releases may rename: where one is missing, Tune's own rules hold, which are slower and
take more memory.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def report_no_callbacks() -> None:
    """Let Tune not count callbacks by their makers: it would import every experiment tracker that is installed, for seconds."""
    usage: Any = getattr(importlib.import_module("ray.tune.tune"), "air_usage", None)
    if hasattr(usage, "tag_callbacks"):
        usage.tag_callbacks = lambda callbacks: False


class _NoAnalysis:
    """What a run of Tune returns instead of a list of its trials' files, which nobody reads here."""

    trials: tuple[Any, ...] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        pass


@contextmanager
def nothing_analysed() -> Iterator[None]:
    """Context in which Tune does not list its trials' files as a run ends: a working directory that is gone, or a trial that
    never started, would end the study. Afterwards it does, for runs of the user's own.
    """
    tune: Any = importlib.import_module("ray.tune.tune")
    usual = getattr(tune, "ExperimentAnalysis", None)
    if usual is not None:
        tune.ExperimentAnalysis = _NoAnalysis
    try:
        yield
    finally:
        if usual is not None:
            tune.ExperimentAnalysis = usual


@contextmanager
def resources_counted_by(nodes: Callable[[], Sequence[Mapping[str, Any]]]) -> Iterator[None]:
    """Context in which Ray counts a cluster's resources from what `nodes` says of its live machines.

    Tune counts them as each run begins. Ray's own function ends the whole process where the head has been started anew;
    `nodes` raises.
    """
    ray: Any = importlib.import_module("ray")
    usual = ray.cluster_resources

    def counted() -> dict[str, float]:
        total: Counter[str] = Counter()
        for node in nodes():
            total.update(node["Resources"])
        return dict(total)

    ray.cluster_resources = counted
    try:
        yield
    finally:
        ray.cluster_resources = usual


def unstage(controller: Any, trial: Any) -> None:
    """Let Tune no longer count on a process for a pending trial that is stopped: it would for the rest of the run."""
    staged: set[Any] = getattr(controller, "_staged_trials", set())
    if trial in staged and hasattr(controller._actor_cache, "decrease_max"):
        staged.remove(trial)
        controller._actor_cache.decrease_max(trial.placement_group_factory)


def keep_processes(controller: Any) -> None:
    """Make a Tune controller, or its wrapper as a scheduler sees it, keep its processes for as long as there may be trials."""
    controller = getattr(controller, "_tune_controller", controller)
    needed = (
        "_actor_cache",
        "_maybe_reuse_cached_actor",
        "_trial_to_actor",
        "_actor_manager",
        "_started_actors",
        "_pending_trials",
        "_search_alg",
    )
    of_cache = ("_cached_objects", "_num_cached_objects", "_max_num_objects")
    if not all(hasattr(controller, name) for name in needed) or isinstance(controller._actor_cache, _Idle):
        return
    if all(hasattr(controller._actor_cache, name) for name in of_cache):
        controller._actor_cache = _Idle(controller._actor_cache)
        controller._maybe_reuse_cached_actor = _Reuse(controller)


def end_at_once(controller: Any, ray_is_gone: Callable[[], bool]) -> None:
    """Make a Tune controller not wait for its processes at the end of its run, which takes five seconds, if Ray has died."""
    controller = getattr(controller, "_tune_controller", controller)
    usual = getattr(controller, "_cleanup_trials", None)
    if usual is None or getattr(usual, "ends_at_once", False):
        return

    def cleanup() -> None:
        if not ray_is_gone():
            usual()

    cleanup.ends_at_once = True  # type: ignore[attr-defined]
    controller._cleanup_trials = cleanup


def forget_ended(controller: Any) -> None:
    """Let a Tune controller drop the trials that have ended and hold no process, but not its latest: without any, Tune would
    look for them in a file when its run ends.
    """
    names = (
        "_stopped_trials",
        "_failed_trials",
        "_live_trials",
        "_trials_to_cache",
        "_trials",
        "_trial_to_actor",
    )
    if not all(hasattr(controller, name) for name in names):
        return
    stopped, failed, *others, listed, processes = (getattr(controller, name) for name in names)
    ended = {trial for trial in stopped | failed if trial not in processes} - {*listed[-1:]}
    if ended:
        listed[:] = [trial for trial in listed if trial not in ended]
        for kept in (stopped, failed, *others):
            kept -= ended


class _Idle:
    """Idle processes by the resources they hold. One is given up only if a trial that needs other resources is waiting."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache  # Tune's, which does all the rest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def cache_object(self, key: Any, obj: Any) -> bool:
        if self._is_wanted_elsewhere(key):
            return bool(self._cache.cache_object(key, obj))
        self._cache._cached_objects[key].append(obj)
        self._cache._num_cached_objects += 1
        return True

    def flush_cached_objects(self, force_all: bool = False) -> Iterator[Any]:
        if force_all or any(
            self._is_wanted_elsewhere(key) for key, objs in self._cache._cached_objects.items() if objs
        ):
            yield from self._cache.flush_cached_objects(force_all=force_all)

    def _is_wanted_elsewhere(self, key: Any) -> bool:
        return any(waiting > 0 for other, waiting in self._cache._max_num_objects.items() if other != key)


class _Reuse:
    """Gives an idle process to a trial, but not to one whose own process is starting, while there is another to come."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._reuse = controller._maybe_reuse_cached_actor  # bound, as it was

    def __call__(self, trial: Any) -> bool:
        if self._is_starting(trial) and not self._is_last(trial):
            return False
        return bool(self._reuse(trial))

    def _is_last(self, trial: Any) -> bool:
        """Whether no other trial can take an idle process of this one's kind."""
        return self._controller._search_alg.is_finished() and all(
            other is trial
            or other.placement_group_factory != trial.placement_group_factory
            or self._is_starting(other)
            for other in self._controller._pending_trials
        )

    def _is_starting(self, trial: Any) -> bool:
        """Whether a process for this trial holds its resources and is coming up."""
        process = self._controller._trial_to_actor.get(trial)
        return (
            process is not None
            and self._controller._actor_manager.is_actor_started(process)
            and process not in self._controller._started_actors
        )
