"""A trial's settings as configuration or code for other frameworks. Entry points: `FRAMEWORKS` and `chosen_settings`."""

from .settings import ChosenSettings, EvenPlan, chosen_settings, nearest_even_plan, settings_of
from .texts import FRAMEWORKS, Pasted

__all__ = ["FRAMEWORKS", "ChosenSettings", "EvenPlan", "Pasted", "chosen_settings", "nearest_even_plan", "settings_of"]
