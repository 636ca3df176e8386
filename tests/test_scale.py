"""What a study costs its driver does not grow with its trials: counted in statements and readings, never timed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from bsearch.search.one_writer import OneWriterStorage
from bsearch.search.sampler import FrontSampler
from bsearch.search.setups import known_seconds, known_train_s, trial_setup
from bsearch.search.suggest import Suggester, open_storage
from bsearch.spaces.device import DeviceProfile
from bsearch.spaces.errors import InfeasiblePlanError
from bsearch.spaces.step_time import StepTime
from bsearch.spaces.study_file import read_study
from bsearch.spaces.trial import Suggestion
from optuna.trial import FrozenTrial, TrialState, create_trial

PROFILE = DeviceProfile(
    kind="gpu",
    device="none",
    training_set=1000,
    smallest_micro_batch=2,
    step_times=(StepTime(((2, 0.002), (64, 0.06), (200, 0.5)), update_s=0.001, interval=0.01),),
)


def test_the_law_of_seconds_is_that_of_the_trials_setup(study_file: Callable[..., Path]) -> None:
    """The slow twin: the whole setup of a trial, then its seconds."""
    space = {
        "effective_batch": {"low": 1, "high": 1000},
        "reference_rate": {"low": 0.01, "high": 1.0, "at_batch": 64},
        "rule": ["linear", "sqrt", "adam_sde"],
        "epochs": {"low": 0.3, "high": 5.0},
        "accumulation": {"low": 1, "high": 6},
    }
    spec = read_study(study_file(space=space))
    law = known_seconds(spec, {(): PROFILE})
    assert law is not None
    chance, none = random.Random(0), 0
    for _ in range(600):
        searched = {
            "effective_batch": round(1000 ** chance.random()),
            "reference_rate": chance.uniform(0.01, 1.0),
            "rule": chance.choice(space["rule"]),  # type: ignore[arg-type]
            "epochs": chance.uniform(0.3, 5.0),
            "accumulation": chance.randint(1, 6),
        }
        try:
            setup = trial_setup(spec, "law", Suggestion(0, {**spec.fixed(), **searched}), PROFILE, "gpu")
        except InfeasiblePlanError:
            none += 1
            assert math.isnan(law(searched))
        else:
            assert law(searched) == law(searched) == known_train_s(PROFILE, setup)
    assert 0 < none < 500
