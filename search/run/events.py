"""What happens in a run, for progress displays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...spaces.record import TrialRecord
from ...spaces.trial import Measurement, TrialSetup


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a run, for progress displays."""

    kind: Literal["started", "measured", "ended", "message"]
    setup: TrialSetup | None = None
    measurement: Measurement | None = None
    record: TrialRecord | None = None
    text: str = ""
