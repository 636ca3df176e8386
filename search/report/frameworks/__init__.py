"""A trial's settings as configuration or code for other frameworks. Entry points: `FRAMEWORKS` and `settings_to_export`."""

from .settings import ChosenSettings, EvenPlan, chosen_settings, nearest_even_plan, settings_of, settings_to_export
from .texts import FRAMEWORKS, Exported

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
