"""Step times of our training loop against a minimal hand-written one, and of uneven against even micro-batches.

    .venv/bin/python benchmarks/training_loop.py [--rounds 15] [--roads]

The plain loop is the usual one: shuffle, index tensors, cross-entropy, backward, step. Ours does the same work on the same
model and batch, and also schedules the rate, keeps the stream of samples exact and checks what the task returns.
Both run in the same process in alternating bursts and are built anew seven times, since where their tensors happen to lie
moves a step by a few percent; the printed ratio is the median over these of the median ratio within a round.
With `--roads`, each way to train a trial beside the library's own training: see `roads.py`.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from typing import Any

import torch
from bsearch.benchmarks.verify.claims import of_repeats
from bsearch.benchmarks.verify.measured import medians
from bsearch.benchmarks.verify.stages.speed import compared, our_loop, plain_loop
from bsearch.benchmarks.verify.stages.tasks import setup_of
from bsearch.objectives.digits import Digits
from bsearch.objectives.task import Data, Task
from bsearch.objectives.vision import small_cnn
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.trial import TrialSetup
from torch import nn
from torch.utils.data import TensorDataset


class Images(Task):
    """Three convolutions with BatchNorm on 4,000 random images of 16 x 16 pixels."""

    def data(self, setup: TrialSetup) -> Data:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(4000, 3, 16, 16, generator=generator)
        labels = torch.randint(0, 10, (4000,), generator=generator)
        return Data(TensorDataset(images, labels), TensorDataset(images[:100], labels[:100]))

    def model(self, setup: TrialSetup) -> nn.Module:
        return small_cnn(16, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--roads", action="store_true", help="each way to train beside its library's own")
    options = parser.parse_args()
    rounds = options.rounds
    torch.set_num_threads(1)
    if options.roads:
        from roads import compare_roads

        compare_roads(rounds)
        return
    device = "gpu" if torch.cuda.is_available() else "cpu"
    tasks: dict[str, Any] = {"digits net": Digits(), "small_cnn 16x16": Images()}
    print("our loop against the plain one               ours ms   plain ms   ours/plain")
    for (name, task), batch in itertools.product(tasks.items(), (64, 256, 1000)):
        build_ours, build_plain = (
            partial(our_loop, task, setup_of(BatchPlan(batch), device)),
            partial(plain_loop, task, batch, device, {}),
        )
        mine, theirs, ratios = medians(compared(build_ours, build_plain, rounds))
        ratio = of_repeats("", 0.0, ratios)
        print(
            f"{name:<18} B {batch:<5} no accumulation   {mine * 1e3:9.3f}  {theirs * 1e3:9.3f}   "
            f"{ratio.measured:+9.1%} +/- {ratio.uncertainty:.1%}",
            flush=True,
        )
    print("\nuneven against even micro-batches (k = 4)    uneven    even       per sample")
    for name, task in tasks.items():
        for uneven, even in ((501, 500), (999, 1000), (257, 256)):
            plans = [BatchPlan(batch, 4) for batch in (uneven, even)]
            a, b, ratios = medians(
                compared(*(partial(our_loop, task, setup_of(plan, device)) for plan in plans), rounds=rounds)
            )
            ratio = 1 + of_repeats("", 0.0, ratios).measured
            print(
                f"{name:<18} {uneven} = {plans[0].micro_batches()!s:<26} {a * 1e3:8.3f}  {b * 1e3:8.3f}  "
                f"{ratio * even / uneven - 1:+9.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
