"""What taking a script over costs: seconds of its passes by itself and in a trial, side by side.

    .venv/bin/python benchmarks/script_overhead.py [--repeats 5]

The script measures each of its passes itself. Printed are medians over all passes but the first of each run, the two ways
taking turns, and their ratio; `parts` is the same in parts of half a batch.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from bsearch.objectives.script.script import run_script
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.training import Training
from bsearch.spaces.trial import TrialSetup

EPOCHS, SAMPLES = 4, 1400
SCRIPT = """
import argparse, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from bsearch.objectives.digits import digit_images

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--net", default="mlp")
args = parser.parse_args()
torch.set_num_threads(1)
images, labels = digit_images()
loader = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=args.batch_size, shuffle=True)
if args.net == "mlp":
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
else:
    layers = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers, nn.Linear(4096, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
for epoch in range(args.epochs):
    begun = time.perf_counter()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    print("seconds:", time.perf_counter() - begun)
"""


def alone(folder: Path, net: str, batch: int) -> list[float]:
    command = [sys.executable, "train.py", "--batch-size", str(batch), "--net", net]
    output = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    return [float(found) for found in re.findall(r"seconds: (\S+)", output)][1:]


def in_trial(folder: Path, net: str, plan: BatchPlan) -> list[float]:
    training = Training.model_validate({"schedule": "constant", "warmup": 0})
    setup = TrialSetup(
        "overhead", 0, 0, plan, OptimizerSettings(0.1), EPOCHS * SAMPLES, training, epochs=EPOCHS
    )
    setup = replace(setup, folder=str(folder), metric="seconds", cpus=1)
    if plan.accumulation > 1:
        setup = replace(setup, largest_micro_batch=-(-plan.effective_batch // plan.accumulation))
    told = partial(run_script, batch="--batch-size", rate="--lr", epochs="--epochs", metric="seconds:")
    return [one.scores["seconds"] for one in told(setup, "train.py", f"--net {net}")][1:]


def main(repeats: int) -> None:
    print(f"{'net':<6}{'batch':>6}{'alone ms/step':>15}{'in a trial':>12}{'ratio':>8}{'parts':>8}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        for net in ("mlp", "cnn"):
            for batch in (8, 64, 512):
                own, taken, parted = list[float](), list[float](), list[float]()
                for _ in range(repeats):
                    own += alone(folder, net, batch)
                    taken += in_trial(folder, net, BatchPlan(batch))
                    parted += in_trial(folder, net, BatchPlan(batch, 2))
                steps = -(-SAMPLES // batch)
                one, other, two = (1e3 * statistics.median(some) / steps for some in (own, taken, parted))
                print(
                    f"{net:<6}{batch:>6}{one:>15.3f}{other:>12.3f}{other / one:>8.3f}{two / one:>8.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    main(parser.parse_args().repeats)
