"""The cost of a checkpoint: seconds to write and to read it, and its size, for several models.

Prints a table; record figures with date and machine in docs/log.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torchvision
from bsearch.objectives.state.checkpoint import Checkpoint, random_state
from bsearch.spaces.trial import Measurement


def cost(name: str, optimizer: str, folder: Path, repeats: int) -> tuple[float, float, float]:
    """Median seconds to write and to read a checkpoint, and its MiB."""
    model = torchvision.models.get_model(name)
    steps = (
        torch.optim.AdamW(model.parameters())
        if optimizer == "adamw"
        else torch.optim.SGD(model.parameters(), momentum=0.9)
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    steps.step()
    url = str(folder / f"{name}.pt")
    writes, reads = [], []
    for _ in range(repeats):
        checkpoint = Checkpoint(url, 0.0, "benchmark")
        checkpoint.add(Measurement(samples_seen=1, elapsed_s=1.0, accuracy=0.5))
        started = time.perf_counter()
        rng_state = [random_state(torch.device("cpu"))]
        checkpoint.save(
            {"model": model.state_dict(), "optimizer": steps.state_dict(), "rng_state": rng_state}
        )
        writes.append(time.perf_counter() - started)
        assert not checkpoint._write_error, checkpoint._write_error
        started = time.perf_counter()
        assert Checkpoint(url, 0.0, "benchmark").load() is not None
        reads.append(time.perf_counter() - started)
    return statistics.median(writes), statistics.median(reads), Path(url).stat().st_size / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{'model':<22} {'optimizer':<9} {'MiB':>8} {'write s':>8} {'read s':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for name, optimizer in [
            ("mobilenet_v3_small", "sgd"),
            ("resnet18", "sgd"),
            ("resnet50", "adamw"),
            ("vit_b_16", "adamw"),
        ]:
            write_s, read_s, size = cost(name, optimizer, Path(folder), options.repeats)
            print(f"{name:<22} {optimizer:<9} {size:>8.1f} {write_s:>8.2f} {read_s:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
