"""What the examination before the first trial costs, and whether it raises false alarms.

python benchmarks/examination.py seconds             # digits, ResNet-18, the GPT example; three repeats, medians
python benchmarks/examination.py alarms --seeds 50   # the zoo's exact trainings at many seeds: the whole examination
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from statistics import median

import torch
from bsearch.objectives.examination.examine import examined
from bsearch.objectives.loading import load_task
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.task import Task
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.errors import BsearchError
from bsearch.spaces.laws.device import ProfileRequest
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.trial import TrialSetup

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers import setup  # noqa: E402  # of the tests
from zoo.entries import ENTRIES  # noqa: E402

# Changes of the training.
SETTINGS = {"fp32": {}, "bf16": {"precision": "bf16"}, "compiled": {"compile": True}}


class ResNet(Task):
    """ResNet-18 on images of random numbers, 32 by 32."""

    def data(self, setup: TrialSetup):
        from bsearch.objectives.task import Data
        from torch.utils.data import TensorDataset

        images = TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,)))
        return Data(images, images)

    def model(self, setup: TrialSetup):
        import torchvision

        return torchvision.models.resnet18(num_classes=10)


def seconds(repeats: int) -> None:
    tasks = {
        "digits": (load_task("bsearch.objectives.digits:Digits"), {}),
        "ResNet-18, 32 x 32": (ResNet(), {}),
        "examples/gpt": (load_task(f"{ROOT}/examples/gpt/tasks.py:GPT"), {"width": 64, "depth": 2}),
    }
    print(f"{'task':22}{'first, s':>10}{'median, s':>11}  samples  off       verdict")
    for name, (task, parameters) in tasks.items():
        took = []
        for _ in range(repeats + 1):
            run = TrainingRun(task, setup(1, parameters=parameters))
            begun = time.perf_counter()
            found = examined(run, 2 if "ResNet" in name else 1)
            took.append(time.perf_counter() - begun)
        print(
            f"{name:22}{took[0]:10.2f}{median(took[1:]):11.2f}  {found.samples:7}  {found.difference:.1e}   {found.verdict}"
        )


def alarms(seeds: int, settings: list[str], dealt: bool) -> None:
    """Dealt: each seed in one of the settings, in turn, rather than in all of them."""
    print(
        f"{'training':52}"
        + "".join(f"{name:>10}" for name in settings)
        + "   refused of so many seeds; worst difference"
    )
    total = count = 0
    for entry in ENTRIES:
        if entry.expects != "exact" or entry.framework:
            continue
        row, worst = [], 0.0
        for place, training in enumerate(map(SETTINGS.__getitem__, settings)):
            if entry.is_loop and "compile" in training:
                row.append(0)  # which is no option of a loop
                continue
            refused = 0
            chosen = range(place, seeds, len(settings)) if dealt else range(seeds)
            for seed in chosen:
                made = setup(8, training={**training, "seed": seed}, metric=entry.metric)
                request = ProfileRequest(made, Memory(), highest=40, devices=(1, 2), timing_s=0.0)
                try:
                    found = profile_task(entry.reference, request).examination
                except BsearchError as error:
                    print(entry.name, seed, error)
                    refused += 1
                    continue
                refused += found.verdict != "exact"
                worst = max(worst, found.difference)
                if found.verdict != "exact":
                    print(
                        f"  {entry.name}, seed {seed}: {found.sentence} {[str(one) for one in found.refusals]}"
                    )
            count += len(chosen)
            row.append(refused)
        total += sum(row)
        print(
            f"{entry.name:52}" + "".join(f"{refused:10}" for refused in row) + f"   {worst:.1e}", flush=True
        )
    print(f"false alarms: {total} of {count}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("seconds", "alarms"))
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--dealt", action="store_true", help="each seed in one of the settings, in turn")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    seconds(arguments.repeats) if arguments.what == "seconds" else alarms(
        arguments.seeds, arguments.settings, arguments.dealt
    )
