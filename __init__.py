"""Hyperparameter search that treats the batch size as what it is: a number to be tuned.

    import bsearch

    study = bsearch.run("study.yaml")      # or resume it
    study.front.to_frame()                 # the Pareto front of training time against accuracy
    study.plot()
    study.train(within="1%", out="model")  # train the fastest point within 1 % of the best
    print(study.export(to="hf"))           # its settings, to paste into a Trainer

The names in `__all__` are the public interface. They are imported on first use: `import bsearch` imports neither torch nor Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster.study import Study, run
    from .objectives.data.sample_weights import balanced
    from .objectives.loop import Loop
    from .objectives.state.checkpoint import Checkpoint
    from .objectives.task import Data, Loss, Score, Task, WholeSet
    from .search.suggest.ask_tell import Search
    from .search.suggest.optuna.sampler import FrontSampler
    from .spaces.errors import (
        BsearchError,
        ClusterError,
        InfeasiblePlanError,
        LeftOutWarning,
        NoStudyError,
        OutputError,
        ProfilingError,
        StorageError,
        StudyFileError,
        TaskError,
    )
    from .spaces.plan import plan_batch
    from .spaces.trial import Measurement, TrialSetup

_MODULES = {
    "BsearchError": "spaces.errors",
    "Checkpoint": "objectives.state.checkpoint",
    "ClusterError": "spaces.errors",
    "Data": "objectives.task",
    "FrontSampler": "search.suggest.optuna.sampler",
    "InfeasiblePlanError": "spaces.errors",
    "LeftOutWarning": "spaces.errors",
    "Loop": "objectives.loop",
    "Loss": "objectives.task",
    "Measurement": "spaces.trial",
    "NoStudyError": "spaces.errors",
    "OutputError": "spaces.errors",
    "ProfilingError": "spaces.errors",
    "Score": "objectives.task",
    "Search": "search.suggest.ask_tell",
    "StorageError": "spaces.errors",
    "Study": "cluster.study",
    "StudyFileError": "spaces.errors",
    "Task": "objectives.task",
    "TaskError": "spaces.errors",
    "TrialSetup": "spaces.trial",
    "WholeSet": "objectives.task",
    "balanced": "objectives.data.sample_weights",
    "plan_batch": "spaces.plan",
    "report": "objectives.script.takeover",
    "run": "cluster.study",
}

__all__ = [
    "BsearchError",
    "Checkpoint",
    "ClusterError",
    "Data",
    "FrontSampler",
    "InfeasiblePlanError",
    "LeftOutWarning",
    "Loop",
    "Loss",
    "Measurement",
    "NoStudyError",
    "OutputError",
    "ProfilingError",
    "Score",
    "Search",
    "StorageError",
    "Study",
    "StudyFileError",
    "Task",
    "TaskError",
    "TrialSetup",
    "WholeSet",
    "balanced",
    "plan_batch",
    "report",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from .spaces.boundary.distribution import installed_version

        value: Any = installed_version()
    elif name in _MODULES:
        value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
