"""A trial's settings in the words of the framework somebody trains with; the door is `FRAMEWORKS` and `chosen_settings`."""

from .settings import ChosenSettings, EvenPlan, chosen_settings, nearest_even_plan, settings_of
from .texts import FRAMEWORKS, Pasted

__all__ = ["FRAMEWORKS", "ChosenSettings", "EvenPlan", "Pasted", "chosen_settings", "nearest_even_plan", "settings_of"]
