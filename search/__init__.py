"""What happens on the driver: what to try next, what to keep, and the front that comes of it.

People with a scheduler and a training loop of their own start with `Search`: ask, report, tell.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .suggest.ask_tell import Search

__all__ = ["Search"]


def __getattr__(name: str) -> Any:
    # Optuna takes a second to import, and most commands do not need it.
    if name == "Search":
        from .suggest.ask_tell import Search

        return Search
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
