"""The plan of a GPT of 124 million weights at 512 tokens under small memory limits: activation checkpointing and micro-batch.

    .venv/bin/python benchmarks/plans.py                      # traced as CUDA for a card that is not here: one minute
    .venv/bin/python benchmarks/plans.py --here --limits 4    # measured and timed on this machine: half an hour on a CPU

Needs `pip install '.[language]'`. Without step times nothing is known to be faster, so the plan is the one with the least
checkpointing that fits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

from bsearch.search.preview.check import profile_study
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.laws.cards import card_named
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.planning import planned
from bsearch.spaces.readable import readable_bytes, seconds
from bsearch.spaces.study.file import read_study
from bsearch.spaces.study.spec import StudySpec
from transformers import GPT2Config

BATCHES = (8, 33, 128)

STUDY = """
study: plans
task: bsearch.objectives.language:CausalLM
space:
  model: model
  tokenizer: bytes
  from_scratch: true
  text: text.jsonl
  length: 512
  effective_batch: {{low: 1, high: 128}}
  reference_rate: 1e-4
  epochs: 1
objectives: {{metric: {{name: val_loss, direction: minimize}}}}
training: {{precision: {precision}}}
memory: {{limit: {limit}GiB{most}}}
budget: {{trials: 1}}
"""


def study(folder: Path, limit: float, precision: str, most: int | None) -> StudySpec:
    GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0).save_pretrained(folder / "model")
    lines = (json.dumps({"text": text}) for _, text in sorted(topics.items()))
    (folder / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    path = folder / f"plans-{limit:g}.yaml"
    more = "" if most is None else f", largest_micro_batch: {most}"
    path.write_text(STUDY.format(limit=limit, precision=precision, most=more), encoding="utf-8")
    return read_study(path)


def print_plans(spec: StudySpec, profile: DeviceProfile, limit: float, took_s: float) -> None:
    caps = ", ".join(f"{one.activation_checkpointing} {one.largest_micro_batch}" for one in profile.each)
    for batch in BATCHES:
        plan = planned(spec, profile, batch, 1)
        used = profile.under(plan)
        law = used.step_time(1)
        assert used.memory is not None
        print(
            f"{limit:>3g} GiB  {caps:<36}{batch:>5}  {plan.activation_checkpointing:<10}"
            f"{f'{plan.largest_micro_batch} x {plan.accumulation}':>9}"
            f"{readable_bytes(used.memory.peak_bytes(plan.largest_micro_batch)):>11}"
            f"{'-' if law is None else seconds(law.step_s(plan)):>9}{took_s:>7.0f}",
            flush=True,
        )


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--here", action="store_true", help="time the steps on this machine")
    arguments.add_argument("--like", default="A100 80GB", help="the card, where nothing is measured")
    arguments.add_argument(
        "--limits", type=float, nargs="+", default=[3.0, 4.0, 8.0, 16.0, 24.0], help="in GiB"
    )
    arguments.add_argument("--precision", default="bf16")
    arguments.add_argument("--most", type=int, help="the largest micro-batch to time")
    arguments.add_argument(
        "--seconds", type=float, default=60.0, help="to time the steps of each kind of checkpointing"
    )
    given = arguments.parse_args()
    print(
        f"{'limit':<9}{'largest micro-batch':<36}{'batch':>5}  {'chosen':<10}{'m x k':>9}{'peak':>11}{'step':>9}{'took s':>7}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for limit in given.limits:
            spec = study(Path(folder), limit, given.precision, given.most)
            started = time.perf_counter()
            try:
                card = None if given.here else card_named(given.like)
                profiled = profile_study(spec.changed({"budget": {"profile_s": given.seconds}}), card)
            except StudyFileError as error:
                print(f"{limit:>3g} GiB  {error}")
                continue
            (profile,) = profiled.profiles.values()
            print_plans(spec, profile, limit, time.perf_counter() - started)
            for row in profiled.memory:
                if row.measured is not None:
                    print(
                        f"    {row.recomputed} {row.micro_batch}: predicted {readable_bytes(row.predicted)}, "
                        f"measured {readable_bytes(row.measured)}, {row.predicted / row.measured - 1:+.1%}"
                    )


if __name__ == "__main__":
    main()
