"""A trial's settings as configuration or code for other frameworks. Entry points: `FRAMEWORKS` and `settings_to_export`."""

from collections.abc import Callable
from functools import partial
from typing import get_args

from ....spaces.boundary.plug_ins import plug_in
from ....spaces.study.spec import Framework
from .settings import ChosenSettings, settings_to_export
from .texts import Exported, huggingface, lightning, pytorch, settings_yaml

GROUP = "bsearch.exporters"

Exporter = Callable[[ChosenSettings], Exported]


def _plugged_in(name: str, chosen: ChosenSettings) -> Exported:
    exporter: Exporter = plug_in(GROUP, name)
    return exporter(chosen)


_OURS: dict[str, Exporter] = {
    "hf": huggingface,
    "lightning": lightning,
    "pytorch": pytorch,
    "yaml": settings_yaml,
}
FRAMEWORKS: dict[Framework, Exporter] = {
    name: _OURS.get(name) or partial(_plugged_in, name) for name in get_args(Framework)
}

__all__ = ["FRAMEWORKS", "GROUP", "ChosenSettings", "Exported", "settings_to_export"]
