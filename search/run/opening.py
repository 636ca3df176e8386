"""What is known before the first trial, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from ...spaces.domain import bounds
from ...spaces.laws.device import HEADROOM, DeviceProfile
from ...spaces.laws.step_time import Exchange
from ...spaces.plan import ActivationCheckpointing, Embedding
from ...spaces.planning import micro_batch_cap
from ...spaces.readable import readable_bytes
from ...spaces.readable import seconds as readable_seconds
from ...spaces.record import TrialRecord
from ...spaces.study.spec import StudySpec

# An honest interval holds about this share of what comes; fewer settled predictions than that judge none.
HOLDS, _ENOUGH = 0.9, 5


def feasible_batches_sentence(
    spec: StudySpec, feasible: tuple[int, int], profiles: Iterable[DeviceProfile]
) -> str:
    """The feasible batches and their limits, in one line."""
    profiles = list(profiles)
    caps = _capped(spec, profiles)
    limits = sorted({profile.limit_bytes for profile in profiles if profile.limit_bytes is not None})
    kinds = dict.fromkeys(variant.recomputes for profile in profiles for variant in profile.each)
    sentence = f"feasible batches: {feasible[0]} to {feasible[1]}"
    if caps and len(kinds) == 1 and _words(*next(iter(kinds))) in _PLAIN:
        sentence += f", in micro-batches of at most {' or '.join(map(str, caps))} samples"
    elif caps:
        each = (f"{_range(_caps(spec, profiles, kind))} {_words(*kind)}" for kind in kinds)
        sentence += f"; largest micro-batch {', '.join(each)}"
    if limits:
        sentence += f" ({readable_bytes(limits[0])} per device, {HEADROOM:.0%} headroom)"
    return sentence


_WITH = {
    "none": "without activation checkpointing",
    "selective": "with selective activation checkpointing",
    "full": "with full activation checkpointing",
}


# Where nothing is recomputed.
_PLAIN = (_WITH["none"], "unsplit")


def _words(mode: ActivationCheckpointing, embedding: Embedding) -> str:
    """What is recomputed, to follow a noun.

    >>> _words("full", ""), _words("selective", "cached")
    ('with full activation checkpointing', 'with embeddings cached and selective activation checkpointing')
    """
    if not embedding:
        return _WITH[mode]
    how = "unsplit" if embedding == "whole" else "with embeddings cached"
    joint = " and" if embedding == "cached" else ","
    return (
        how
        if mode == "none"
        else f"{how}{joint} {_WITH[mode].removeprefix('with ' if embedding == 'cached' else '')}"
    )


def _caps(
    spec: StudySpec, profiles: Iterable[DeviceProfile], kind: tuple[ActivationCheckpointing, Embedding]
) -> list[int]:
    """The largest micro-batches of profiles that recompute this, ascending."""
    return _capped(
        spec, [variant for profile in profiles for variant in profile.each if variant.recomputes == kind]
    )


def _capped(spec: StudySpec, profiles: Iterable[DeviceProfile]) -> list[int]:
    """The largest micro-batches of profiles on each number of devices that a trial may have, ascending."""
    caps = {
        micro_batch_cap(spec, profile, devices, None)
        for profile in profiles
        for devices in spec.devices.counts
    }
    return sorted(cap for cap in caps if cap is not None)


def _range(values: list[int]) -> str:
    return " to ".join(str(value) for value in dict.fromkeys((values[0], values[-1]))) if values else "any"


def exchange_sentence(exchange: Exchange) -> str:
    """What the network between a trial's machines costs it.

    >>> exchange_sentence(Exchange(2, 4_000_000, 0.012, 0.003))
    'summing 3.81 MiB of gradients takes 12 ms over 2 machines, 3 ms within one; training overlaps with a part of it'
    """
    return (
        f"summing {readable_bytes(exchange.gradient_bytes)} of gradients takes {readable_seconds(exchange.all_s)} over "
        f"{exchange.machines} machines, {readable_seconds(exchange.within_s)} within one; training overlaps with a part of it"
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Of ascending values, the smallest that at least this share of them do not exceed."""
    return values[max(math.ceil(share * len(values)) - 1, 0)]


def widened(stated: float | None, errors: Iterable[float]) -> float | None:
    """A relative half width after predictions were settled: that which holds 90 % of them, where the stated one does not.

    >>> widened(0.1, [0.0, -0.05, 0.05, 0.1, 0.4]), widened(0.1, [0.0, -0.05, 0.05, 0.1, 0.1]), widened(0.1, [9.0])
    (0.4, 0.1, 0.1)
    """
    sizes = sorted(map(abs, errors))
    return max(stated or 0.0, quantile(sizes, HOLDS)) if len(sizes) >= _ENOUGH else stated


def step_time_summary(
    spec: StudySpec, profiles: Iterable[DeviceProfile], records: Iterable[TrialRecord] = ()
) -> Iterator[str]:
    """The precision of predicted training times, one line per number of devices; by the trials' record, where they have one."""
    profiles = list(profiles)
    settled = [record.facts for record in records if record.counts and record.facts.train_s_error is not None]
    laws = [law for profile in profiles for law in profile.all_step_times]
    if not laws:
        yield "train_s is measured wall-clock time: steps were not timed in advance"
    for devices in sorted({law.devices for law in laws}):
        these = [law for law in laws if law.devices == devices]
        intervals, misfits = [law.interval for law in these], [law.misfit[0] for law in these if law.misfit]
        known = [interval for interval in intervals if interval is not None]
        timed = max(known, default=0.0)
        off = [facts.train_s_error or 0.0 for facts in settled if (facts.devices or 1) == devices]
        came = widened(timed, off) or timed
        rough = "only roughly: there was time for only a few timing rounds"
        precision = f"to ±{timed:.1%}" if len(known) == len(intervals) else rough
        others, stolen, held_back = (
            max(getattr(law, name) for law in these) for name in ("others", "stolen", "held_back")
        )
        causes = [f"other programs used {others:.0%} of this machine"] if others else []
        causes += (
            [f"its host gave {stolen:.0%} of its processor time to other virtual machines"] if stolen else []
        )
        if causes:
            precision += f", since {' and '.join(causes)} while steps were timed"
        if held_back >= 0.01:
            precision += f"; {held_back:.0%} of it is waiting for this container's processor limit (cpu.max)"
        if misfits:
            precision += f" (plans between the timed ones: {max(misfits):.1%})"
        if came > timed:
            precision = f"to ±{came:.1%}, in nine of ten of the {len(off)} trials so far; steps were timed {precision}"
        yield f"train_s, of a training alone on {devices} device{'s' * (devices > 1)}, is known in advance {precision}"
        spread = [law.exchange for law in these if law.exchange is not None]
        if spread:
            yield exchange_sentence(max(spread, key=lambda exchange: exchange.between_s))
        caps = [
            micro_batch_cap(spec, variant, devices, None)
            for profile in profiles
            for variant in profile.each
            if variant.step_time(devices)
        ]
        largest = -(-int(bounds(spec.space.effective_batch)[1]) // devices)
        for law, cap in zip(these, caps, strict=True):
            if law.largest_micro_batch < min(largest, cap or largest):
                words = _words(law.activation_checkpointing, law.embedding)
                what = "micro-batches" if words in _PLAIN else f"{words}, micro-batches"
                yield f"{what} of more than {law.largest_micro_batch} samples were not timed, so none are planned"
