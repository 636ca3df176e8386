"""What happens on a worker: the user's task, exact batches, the training loop and its measurements.

Start with `Task`: write `data` and `model`; everything else has a default.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..spaces.trial import Measurement, TrialSetup
    from .data.batches import SampleKeys
    from .state.checkpoint import Checkpoint
    from .task import Data, Loss, Score, Task, WholeSet

_MODULES = {
    "Checkpoint": ".state.checkpoint",
    "Data": ".task",
    "Loss": ".task",
    "Measurement": "..spaces.trial",
    "SampleKeys": ".batches",
    "Score": ".task",
    "Task": ".task",
    "TrialSetup": "..spaces.trial",
    "WholeSet": ".task",
}

__all__ = ["Checkpoint", "Data", "Loss", "Measurement", "SampleKeys", "Score", "Task", "TrialSetup", "WholeSet"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, and the driver reads task files without it.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_MODULES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
