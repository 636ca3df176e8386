"""`training`: what all trials train with."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StrictBool, StrictInt, StrictStr, model_validator

from ..domain import Number, Section, Share, fault, one_of
from ..schedule import DECAY, SCHEDULES

# Keys of `training` that may be searched in `space` instead; `betas` by one name each.
BETAS = ("beta1", "beta2")
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Beta2Scaling = Literal["constant", "half_life"]
RECIPE = (
    "schedule",
    "warmup",
    "clip_norm",
    "precision",
    *BETAS,
)


# How a user's own code is named: module:name or path/file.py:name, whose folders may have colons in their names.
CODE = r"(?s:[\w.]+|.+\.py):[A-Za-z_]\w*"


def _schedule(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(CODE, value):
        return value  # a function of one's own
    return one_of(value, list(SCHEDULES))


class Training(Section):
    """Settings that all trials train with."""

    precision: Precision = Field(
        "fp32",
        description="Precision of the forward pass; tf32 (NVIDIA GPUs from 2020 on) rounds the factors of matrix products and "
        "convolutions, fp32 does not; bf16 and fp16 use torch's autocast, fp16 with loss scaling.",
    )
    schedule: Annotated[StrictStr, AfterValidator(_schedule)] = Field(
        "cosine",
        description=f"Learning-rate schedule after warm-up: {', '.join(SCHEDULES)}. wsd (warm-up, stable, decay) stays at the "
        f"peak until the last {DECAY:.0%}, over which it falls linearly to 0. Or a function of your own, "
        "`path/file.py:function` relative to the study file, or "
        "`module:function`: of the fraction of the budget, from 0 to 1, it returns the share of "
        "the peak rate; warm-up is multiplied with it.",
    )
    warmup: Share = Field(
        0.05,
        description="Share of the trial's samples over which the learning rate rises linearly from 0.",
    )
    clip_norm: Number | None = Field(
        None, gt=0, description="Maximum norm of the whole step's gradient; null: no clipping."
    )
    evaluations: StrictInt = Field(
        10,
        ge=1,
        le=10_000,
        description="Evaluations per trial, at equal fractions of its samples; the last one is the trial's result.",
    )
    seed: StrictInt = Field(
        0,
        ge=0,
        lt=2**63,
        description="Seed of every trial's initial weights, shuffling and augmentation, and of the sampler.",
    )
    workers: StrictInt = Field(
        0,
        ge=0,
        le=256,
        description="Data-loading processes per device; 0: the training process loads the data.",
    )
    compile: StrictBool = Field(False, description="Compile the model with torch.compile.")
    sync_batch_norm: StrictBool = Field(
        False,
        description="Synchronise BatchNorm statistics over all of a trial's GPUs, instead of computing them on each.",
    )
    betas: tuple[Number, Number] = Field(
        (0.9, 0.999),
        description="Adam's betas at the reference batch; the rule `adam_sde` scales them with the batch.",
    )
    beta2_scaling: Beta2Scaling = Field(
        "constant",
        description="half_life: Adam's beta2 is scaled so that its half-life in samples is the same at every batch, with any "
        "rule but `adam_sde`, which scales the betas itself.",
    )
    eps: Number = Field(
        1e-8,
        gt=0,
        description="Adam's epsilon at the reference batch; the rule `adam_sde` scales it with the batch.",
    )
    ema: Number | None = Field(
        None,
        gt=0,
        lt=1,
        description="Decay per step, at the reference batch, of an exponential moving average of the trainable weights, such "
        "as 0.999: it is evaluated and saved in their place, and its horizon in samples is the same at every batch; null: no "
        "average.",
    )
    accept_inexact: StrictBool = Field(
        False,
        description="Run even if the examination finds that the training or its scores depend on how a batch is split; the "
        "front then says so.",
    )
    samples: StrictInt | None = Field(
        None,
        ge=1,
        description="Samples in the training set; only required if the training code is a loop of your own.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise fault(f"betas: expected two numbers >= 0 and < 1, got {list(self.betas)}")
        return self
