"""What must agree between the parts of a study: each fault names the key to change, and what it disagrees with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from ..domain import values_of
from .training import BETAS, RECIPE

if TYPE_CHECKING:
    from .spec import StudySpec

# A key, dotted, and what was expected there.
Disagreement = tuple[str, str]


def disagreements(study: StudySpec) -> Iterator[Disagreement]:
    """All of a study's; none if its parts go together."""
    parts = (_prices, _speeds, _sampler, _pausing, _recipe, _sharding, _repeats)
    return chain.from_iterable(part(study) for part in parts)


def _prices(study: StudySpec) -> Iterator[Disagreement]:
    speed, also = study.objectives.speed, study.objectives.also
    needed = {
        "objectives.speed": speed == "cost",
        "objectives.also": also == "cost" != speed,
        "budget.cost": study.budget.cost is not None,
    }
    for key, cost in needed.items():
        if cost and not study.devices.prices:
            yield key, "expected devices.prices with it, got none. Write prices: {A100: 1.8} under devices."


def _speeds(study: StudySpec) -> Iterator[Disagreement]:
    """Measures of what training takes, with each other, the metric and the rest."""
    speeds, also, metric = study.objectives.speeds, study.objectives.also, study.objectives.metric.name
    for source, given, results in (
        ("devices.prices", bool(study.devices.prices), ("cost", "price", "spent")),
        ("energy_j", "energy_j" in speeds, ("energy_j", "watts", "measured_energy_j")),
    ):
        if given and metric in results:
            yield (
                "objectives.metric",
                f"expected another name with {source}, which gives results of this one; got {metric}. Rename the metric.",
            )
    if also == study.objectives.speed:
        yield "objectives.also", f"expected another measure than objectives.speed, got {also} twice. Remove also."
    same, several = {"train_s", "device_s", "cost"}, len(study.devices.counts) > 1
    if also and len({*speeds}) > 1 and {*speeds} <= same and (not several or "train_s" not in speeds):
        yield (
            "objectives.also",
            f"expected a measure that is no fixed multiple of {study.objectives.speed}, got {also}, which "
            f"{'always is' if several else 'is one if all trials have as many devices'}. Remove also.",
        )
    if also and study.stopping.kind not in ("front", "none"):
        yield (
            "stopping",
            f"expected front or none with objectives.also, the rules for three objectives; got {study.stopping.kind}. Write "
            "stopping: front.",
        )
    if "energy_j" in speeds and study.devices.share < 1:
        yield (
            "objectives",
            "expected whole devices with energy_j, since a GPU does not say how much each trial uses; got "
            f"devices.per_trial: {study.devices.share:g}. Write per_trial: 1.",
        )


def _sampler(study: StudySpec) -> Iterator[Disagreement]:
    """What only our own sampler can do."""
    if study.sampler == "front":
        return
    if study.budget.min_gain is not None:
        yield (
            "budget.min_gain",
            f"expected sampler: front, whose models say what more trials would add; got {study.sampler}",
        )
    if study.warm_start:
        yield "warm_start", f"expected sampler: front, which alone learns from earlier studies; got {study.sampler}"
    if study.stopping.kind == "pause":
        yield "stopping", f"expected sampler: front with pause, the only one that resumes trials; got {study.sampler}"


def _pausing(study: StudySpec) -> Iterator[Disagreement]:
    if study.stopping.kind != "pause":
        return
    if study.cluster.checkpoints is None:
        yield "stopping", "expected cluster.checkpoints with pause, from which trials go on; got null. Name a folder."
    if study.training.evaluations == 1:
        yield (
            "training.evaluations",
            "expected 2 or more with stopping: pause, which needs one before the end; got 1",
        )


def _recipe(study: StudySpec) -> Iterator[Disagreement]:
    """Keys of `training` that are also searched in `space`."""
    for name in RECIPE:
        written = "betas" if name in BETAS else name
        default = type(study.training).model_fields[written].default
        if getattr(study.space, name) is not None and getattr(study.training, written) != default:
            yield f"space.{name}", f"expected it or training.{written}, got both. Remove one."
    if study.keeps_beta2_half_life and "adam_sde" in values_of(study.space.rule):
        yield (
            study.place_of("beta2_scaling"),
            "expected constant with rule adam_sde, which scales betas itself; got half_life. Remove one.",
        )
    scaled = study.space.ema_scaling is not None or study.training.ema_scaling != "half_life"
    if scaled and not study.averages_weights:
        yield study.place_of("ema_scaling"), "expected training.ema with it, whose decay it scales; got none. Write ema: 0.999."


def _sharding(study: StudySpec) -> Iterator[Disagreement]:
    sharding, counts = study.devices.sharding, study.devices.counts
    if sharding == "fsdp2":
        if len(counts) > 1:
            yield (
                "devices.per_trial",
                f"expected one number with fsdp2, since its memory differs with each; got {', '.join(map(str, counts))}. Write "
                "one of them.",
            )
        if study.averages_weights:
            yield (
                study.place_of("ema"),
                "expected no average of weights with devices.sharding: fsdp2, whose devices hold a share of them each; got "
                "one. Remove it, or write sharding: zero1.",
            )
        for name in ("compile", "channels_last"):
            if getattr(study.training, name):
                yield f"training.{name}", "expected false with devices.sharding: fsdp2, got true. Remove it."
    if sharding == "ddp":
        return
    if max(counts) == 1:
        yield "devices.sharding", f"expected ddp for one device per trial, got {sharding}. Write per_trial: 2"
    if "fp16" in study.recipe_values("precision"):
        yield (
            "devices.sharding",
            f"expected ddp with fp16, since each device would unscale only a share of gradients; got {sharding}. Write "
            "precision: bf16.",
        )


def _repeats(study: StudySpec) -> Iterator[Disagreement]:
    repeats, trials = study.confirm.repeats, study.budget.trials
    if repeats >= trials:
        yield "confirm.repeats", f"expected fewer than budget.trials, {trials}; got {repeats}"
