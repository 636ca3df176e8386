"""A trial's settings as configuration or code for other frameworks. Entry points: `FRAMEWORKS` and `settings_to_export`."""

from collections.abc import Callable

from ....spaces.study.spec import Framework
from .language import LANGUAGE
from .settings import ChosenSettings, EvenPlan, chosen_settings, nearest_even_plan, settings_of, settings_to_export
from .texts import Exported, accelerate, deepspeed, huggingface, lightning, pytorch, settings_yaml

FRAMEWORKS: dict[Framework, Callable[[ChosenSettings], Exported]] = {
    "hf": huggingface,
    "lightning": lightning,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "pytorch": pytorch,
    **LANGUAGE,
    "yaml": settings_yaml,
}

__all__ = [
    "FRAMEWORKS",
    "ChosenSettings",
    "EvenPlan",
    "Exported",
    "chosen_settings",
    "nearest_even_plan",
    "settings_of",
    "settings_to_export",
]
