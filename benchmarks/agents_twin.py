"""What coding agents tune: a small GPT that trains for a fixed time, on a device that it may not fit on. A twin of it on a CPU.

    .venv/bin/python benchmarks/agents_twin.py --make MINUTES     # train and append to the table, which is resumed
    .venv/bin/python benchmarks/agents_twin.py                    # the table, its surrogate, and the tuners by it
    .venv/bin/python benchmarks/agents_twin.py --verify           # the best setting of each search, trained anew

After autoresearch (https://github.com/karpathy/autoresearch): every trial trains for the same five minutes, what counts is the
validation loss in bits per byte, and a setting that does not fit in memory is a lost trial. Here the device is virtual: a
step-time law says how many steps five minutes have, a memory law what fits, and half of random settings do not. Then that
number of steps is trained, bytes of this repository's documentation, in one to three seconds of a core. The table is of docs at
revision 1de46d6f: check those out before training anything beside it. CMA-ES needs `cmaes`.

A tuner's result depends on the device batch by the number of steps alone, so the table has steps among its coordinates and the
surrogate replays it for any device batch.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

HERE = Path(__file__).parent
TABLE = HERE / "data" / "agents_twin.csv"

# Domains as in a study file.
RATES = {
    "matrix_rate": {"low": 1e-4, "high": 1e-1, "log": True},
    "embedding_rate": {"low": 3e-4, "high": 3e-1, "log": True},
    "head_rate": {"low": 1e-4, "high": 1e-1, "log": True},
    "scalar_rate": {"low": 3e-4, "high": 3e-1, "log": True},
}
SPACE: dict[str, dict[str, Any]] = {
    "depth": {"low": 1, "high": 6},
    "width": {"low": 32, "high": 128, "step": 8},
    "heads": {"low": 1, "high": 8},
    "effective_batch": {"low": 4, "high": 256, "log": True},  # sequences of one optimizer step
    **RATES,
    "weight_decay": {"low": 1e-3, "high": 1.0, "log": True},
    "warm_up": {"low": 0.0, "high": 0.4},  # shares of the steps
    "warm_down": {"low": 0.0, "high": 1.0},
    "beta1": {"low": 0.6, "high": 0.98},
    "beta2": {"low": 0.8, "high": 0.999},
}
DEVICE_BATCH = {"low": 1, "high": 256, "log": True}  # sequences of one forward pass
FIELDS = [*SPACE, "steps", "device_batch", "seed", "text", "bits", "train_s"]

LENGTH, VOCABULARY = 32, 256  # of sequences, in bytes
EVALUATED = 192  # validation sequences
# Trainings of the table that are spread over all settings that fit; most others are near good ones.
RANDOM = 300
WORST = 8.0  # bits per byte of a uniform guess, and of what diverged
# The virtual device: floating-point operations a second, seconds of each kernel's launch, bytes of memory, and the time a
# trial has.
FLOPS, LAUNCH_S, MEMORY, TIME_S = 4e8, 0.006, 13e6, 300.0


def parameters_of(setting: Mapping[str, Any]) -> int:
    """The number of the model's parameters, without its few scalars."""
    width, inner = setting["width"], setting["heads"] * head_width(setting)
    return int(setting["depth"] * (4 * width * inner + 8 * width**2) + (2 * VOCABULARY + LENGTH) * width)


def head_width(setting: Mapping[str, Any]) -> int:
    """Of each head; any number of heads is possible at any width."""
    return max(4, round(setting["width"] / setting["heads"]))


def peak_bytes(setting: Mapping[str, Any], device_batch: int) -> float:
    """Memory of a step: weights, gradients and two moments; and what a micro-batch keeps for its backward pass."""
    inner = setting["heads"] * head_width(setting)
    layer = 12 * setting["width"] + 4 * inner + 2 * setting["heads"] * LENGTH
    kept = setting["depth"] * layer + 3 * setting["width"] + 3 * VOCABULARY
    return 16.0 * parameters_of(setting) + 4.0 * device_batch * LENGTH * kept


def step_s(setting: Mapping[str, Any], device_batch: int) -> float:
    """Seconds of a step: all its samples' work, and the launches of each pass and of the optimizer."""
    passes = math.ceil(setting["effective_batch"] / device_batch)
    inner = setting["heads"] * head_width(setting)
    attention = 12.0 * setting["depth"] * LENGTH * inner  # of a byte, forward and backward
    of_byte = 6.0 * (parameters_of(setting) - (VOCABULARY + LENGTH) * setting["width"]) + attention
    launches = passes * (40 * setting["depth"] + 15) + 10
    return setting["effective_batch"] * LENGTH * of_byte / FLOPS + launches * LAUNCH_S


def steps_of(setting: Mapping[str, Any], device_batch: int) -> int:
    return max(1, int(TIME_S / step_s(setting, device_batch)))


def largest_device_batch(setting: Mapping[str, Any]) -> int:
    """The largest micro-batch that fits, by the memory law; 0 where none does."""
    fixed = peak_bytes(setting, 0)
    return (
        min(setting["effective_batch"], int((MEMORY - fixed) // (peak_bytes(setting, 1) - fixed)))
        if fixed < MEMORY
        else 0
    )


@cache
def text() -> tuple[np.ndarray, np.ndarray, str]:
    """Bytes to train on and to validate with, and what names them."""
    docs = HERE.parent / "docs"
    whole = b"".join(file.read_bytes() for file in sorted([*docs.glob("*.md"), *docs.glob("decisions/*.md")]))
    values = np.frombuffer(whole, dtype=np.uint8)
    border = len(values) * 9 // 10
    return values[:border], values[border:], hashlib.sha256(whole).hexdigest()[:8]


def trained(setting: Mapping[str, Any], steps: int, seed: int) -> float:
    """Validation bits per byte after so many steps."""
    import torch
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    width, heads, wide = setting["width"], setting["heads"], head_width(setting)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.Parameter(torch.ones(2, width))
            self.scales = nn.Parameter(torch.ones(2))
            self.queries = nn.Linear(width, 3 * heads * wide, bias=False)
            self.joined = nn.Linear(heads * wide, width, bias=False)
            self.up, self.down = (
                nn.Linear(width, 4 * width, bias=False),
                nn.Linear(4 * width, width, bias=False),
            )
            nn.init.zeros_(self.joined.weight)
            nn.init.zeros_(self.down.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normed = functional.rms_norm(x, (width,), self.gains[0])
            q, k, v = self.queries(normed).view(len(x), -1, 3, heads, wide).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.scales[0] * self.joined(mixed.transpose(1, 2).reshape(len(x), -1, heads * wide))
            normed = functional.rms_norm(x, (width,), self.gains[1])
            return x + self.scales[1] * self.down(functional.relu(self.up(normed)).square())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bytes, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
            for table in (self.bytes, self.places):
                nn.init.normal_(table.weight, std=0.5)
            self.blocks = nn.ModuleList(Block() for _ in range(setting["depth"]))
            self.gain = nn.Parameter(torch.ones(width))
            self.head = nn.Linear(width, VOCABULARY, bias=False)
            nn.init.normal_(self.head.weight, std=0.01)

        def loss(self, sequences: torch.Tensor) -> torch.Tensor:
            x = self.bytes(sequences[:, :-1]) + self.places.weight
            for block in self.blocks:
                x = block(x)
            logits = self.head(functional.rms_norm(x, (width,), self.gain))
            return functional.cross_entropy(logits.reshape(-1, VOCABULARY), sequences[:, 1:].reshape(-1))

    model = Model()
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in RATES}
    for name, parameter in model.named_parameters():
        kind = "matrix" if parameter.ndim == 2 and "gains" not in name else "scalar"
        kind = (
            "embedding"
            if name.startswith(("bytes", "places"))
            else "head"
            if name.startswith("head")
            else kind
        )
        groups[f"{kind}_rate"].append(parameter)
    decays = {"matrix_rate": setting["weight_decay"]}
    optimizer = torch.optim.AdamW(
        [
            {"params": group, "lr": setting[name], "weight_decay": decays.get(name, 0.0)}
            for name, group in groups.items()
        ],
        betas=(setting["beta1"], setting["beta2"]),
        foreach=True,
    )
    train, held, _ = text()

    def sequences(data: np.ndarray, begins: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(data[begins[:, None] + np.arange(LENGTH + 1)].astype(np.int64))

    for step in range(steps):
        up = (step + 1) / max(1.0, setting["warm_up"] * steps)
        down = (steps - step) / max(1.0, setting["warm_down"] * steps)
        for group, name in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = setting[name] * min(1.0, up, down)
        optimizer.zero_grad()
        begins = rng.integers(len(train) - LENGTH, size=setting["effective_batch"])
        for part in np.array_split(begins, math.ceil(len(begins) / 32)):  # what fits in this machine's cache
            loss = model.loss(sequences(train, part)) * (len(part) / len(begins))
            loss.backward()
        if not math.isfinite(loss.item()):
            return WORST
        optimizer.step()
    with torch.no_grad():
        places = np.linspace(0, len(held) - LENGTH - 1, EVALUATED).astype(int)
        bits = float(model.loss(sequences(held, places))) / math.log(2)
    return min(bits, WORST) if math.isfinite(bits) else WORST


def random_value(domain: Mapping[str, Any], at: float) -> float:
    """The value of a domain at a coordinate from 0 to 1."""
    low, high, step = domain["low"], domain["high"], domain.get("step", 1)
    value = low * (high / low) ** at if domain.get("log") else low + (high - low) * at
    return low + step * round((value - low) / step) if isinstance(low, int) else value


def coordinate(domain: Mapping[str, Any], value: float) -> float:
    low, high = domain["low"], domain["high"]
    return math.log(value / low) / math.log(high / low) if domain.get("log") else (value - low) / (high - low)


def next_setting(rows: list[dict[str, Any]], rng: np.random.Generator) -> tuple[dict[str, Any], int, int]:
    """What to train next: a setting that fits, its device batch and seed. First random, then mostly near good ones."""
    kind = rng.random()
    best = sorted(rows, key=lambda row: row["bits"])
    if len(rows) >= RANDOM and kind < 0.1:  # again, mostly of the better half
        row = best[int(len(best) * rng.random() ** 2)]
        return {name: row[name] for name in SPACE}, row["device_batch"], int(rng.integers(1, 1_000_000))
    while True:
        points = rng.random(len(SPACE))
        if len(rows) >= RANDOM and kind < 0.9:
            row = best[int(rng.integers(len(best) // 5))]
            near = np.array([coordinate(domain, row[name]) for name, domain in SPACE.items()])
            moved = rng.random(len(SPACE)) < 0.5
            points = np.where(moved, near + rng.normal(0, 0.15, len(SPACE)), near)
            points = np.clip(np.where(points < 0, -points, np.where(points > 1, 2 - points, points)), 0, 1)
        setting = {
            name: random_value(domain, at) for (name, domain), at in zip(SPACE.items(), points, strict=True)
        }
        most = largest_device_batch(setting)
        # As planned, or as drawn.
        device_batch = (
            most
            if rng.random() < 0.6
            else min(random_value(DEVICE_BATCH, rng.random()), setting["effective_batch"])
        )
        if 1 <= device_batch <= most:
            return setting, int(device_batch), int(rng.integers(1, 1_000_000))


def table() -> list[dict[str, Any]]:
    """The trainings so far."""
    packed = TABLE.with_suffix(".csv.gz")
    if TABLE.exists():
        lines = TABLE.read_text().splitlines()
    elif packed.exists():
        lines = gzip.decompress(packed.read_bytes()).decode().splitlines()
    else:
        return []
    whole = {
        "steps",
        "seed",
        *(
            name
            for name, domain in (SPACE | {"device_batch": DEVICE_BATCH}).items()
            if isinstance(domain["low"], int)
        ),
    }
    return [
        {
            name: value if name == "text" else int(value) if name in whole else float(value)
            for name, value in row.items()
        }
        for row in csv.DictReader(lines)
    ]


def make(minutes: float) -> None:
    """Train for so many minutes, and append to the table."""
    import torch

    torch.set_num_threads(1)
    rows, begun = table(), time.monotonic()
    if not TABLE.exists():
        packed = TABLE.with_suffix(".csv.gz")
        TABLE.write_bytes(
            gzip.decompress(packed.read_bytes()) if packed.exists() else (",".join(FIELDS) + "\n").encode()
        )
    named = text()[2]
    if {row["text"] for row in rows} - {named}:
        raise SystemExit(
            f"{TABLE.name}: trained with another text than that of docs/ now ({named}); check out the table's"
        )
    rng = np.random.default_rng(len(rows))
    with TABLE.open("a") as out:
        while time.monotonic() - begun < 60 * minutes:
            setting, device_batch, seed = next_setting(rows, rng)
            steps, at = steps_of(setting, device_batch), time.perf_counter()
            bits = trained(setting, steps, seed)
            row = setting | {
                "steps": steps,
                "device_batch": device_batch,
                "seed": seed,
                "text": named,
                "bits": round(bits, 5),
            }
            rows.append(row | {"train_s": round(time.perf_counter() - at, 3)})
            csv.writer(out, lineterminator="\n").writerow(
                [f"{value:.6g}" if isinstance(value, float) else value for value in rows[-1].values()]
            )
            out.flush()
    TABLE.with_suffix(".csv.gz").write_bytes(gzip.compress(TABLE.read_bytes(), mtime=0))
    TABLE.unlink()


@dataclass(frozen=True)
class Surrogate:
    """Validation bits of any setting and number of steps, by the table: a Gaussian process."""

    process: Any
    noise: tuple[tuple[float, float], ...]  # bits, and the standard deviation of a run there

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> Surrogate:
        from sklearn.gaussian_process import GaussianProcessRegressor, kernels

        points, targets = features(rows), scaled(np.array([row["bits"] for row in rows]))
        kernel = kernels.ConstantKernel() * kernels.Matern(
            np.full(points.shape[1], 2.0), (0.1, 100.0), nu=2.5
        )
        few = np.random.default_rng(0).permutation(len(rows))[:700]  # for the length scales
        process = GaussianProcessRegressor(kernel + kernels.WhiteKernel(0.05), normalize_y=True).fit(
            points[few], targets[few]
        )
        fixed = GaussianProcessRegressor(process.kernel_, optimizer=None, normalize_y=True).fit(
            points, targets
        )
        return cls(fixed, noise_of(rows))

    def bits(self, settings: list[dict[str, Any]]) -> np.ndarray:
        """Of settings with `steps`, (n,)."""
        return unscaled(self.process.predict(features(settings)))

    def run(self, bits: float, rng: np.random.Generator) -> float:
        """What one run would have measured."""
        at, spread = zip(*self.noise, strict=True)
        return float(min(bits + np.interp(bits, at, spread) * rng.standard_normal(), WORST))


def held_out(rows: list[dict[str, Any]]) -> None:
    """Print how well fifths of the table are predicted from the rest."""
    from scipy.stats import spearmanr

    order, bits = np.random.default_rng(0).permutation(len(rows)), np.array([row["bits"] for row in rows])
    predicted = np.zeros(len(rows))
    for part in range(5):
        left_out = order[part::5]
        rest = [rows[place] for place in np.setdiff1d(order, left_out)]
        predicted[left_out] = Surrogate.of(rest).bits([rows[place] for place in left_out])
    for name, some in (("all", bits < np.inf), ("the better half", bits < np.median(bits))):
        missed, spread = predicted[some] - bits[some], bits[some] - bits[some].mean()
        rank, share = spearmanr(predicted[some], bits[some])[0], 1 - missed @ missed / (spread @ spread)
        print(f"{len(rows)} trainings, held out, {name}: rank correlation {rank:.3f}, R² {share:.3f}")
    print("run noise at bits: " + ", ".join(f"{spread:.3f} at {at:.2f}" for at, spread in noise_of(rows)))


def features(settings: list[dict[str, Any]]) -> np.ndarray:
    """Coordinates of settings with `steps`, (n, d): about 1 wide."""
    rows = [
        [
            *(
                coordinate(domain, min(max(setting[name], domain["low"]), domain["high"]))
                for name, domain in SPACE.items()
                if not name.startswith("beta")
            ),
            *(-math.log(1 - setting[beta]) / 4 for beta in ("beta1", "beta2")),
            math.log(setting["heads"]) / 2,
            math.log(setting["steps"]) / 5,
            math.log(setting["steps"] * setting["effective_batch"]) / 5,
        ]
        for setting in settings
    ]
    return np.array(rows)


def scaled(bits: np.ndarray) -> np.ndarray:
    """Where good settings differ as much as bad ones."""
    return np.log(bits - 2.6)


def unscaled(values: np.ndarray) -> np.ndarray:
    return np.minimum(np.exp(values) + 2.6, WORST)


def noise_of(rows: list[dict[str, Any]]) -> tuple[tuple[float, float], ...]:
    """Bits, and the standard deviation between seeds there, of settings that were trained repeatedly."""
    alike: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        alike.setdefault(tuple(row[name] for name in [*SPACE, "steps"]), []).append(row["bits"])
    several = sorted(
        (np.mean(bits), np.var(bits, ddof=1), len(bits) - 1) for bits in alike.values() if len(bits) > 1
    )
    if len(several) < 8:  # of a table that is being made
        return ((0.0, 0.0),)
    parts = np.array_split(np.array(several), 4)
    return tuple(
        (float(part[:, 0].mean()), float(math.sqrt(np.average(part[:, 1], weights=part[:, 2]))))
        for part in parts
    )


# One reference rate, that of matrices, and ratios to it: two decades each, around the middles of the free ranges.
ONE_RATE: dict[str, dict[str, Any]] = {
    **{name: domain for name, domain in SPACE.items() if name not in RATES},
    "reference_rate": RATES["matrix_rate"],
    "embedding_ratio": {"low": 0.3, "high": 30.0, "log": True},
    "head_ratio": {"low": 0.1, "high": 10.0, "log": True},
    "scalar_ratio": {"low": 0.3, "high": 30.0, "log": True},
}
REFERENCE_BATCH = 16


def with_rates(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A setting with its four rates, of one with ratios; within their free ranges, beyond which the table knows nothing."""
    if "learning_rate" not in parameters:
        return dict(parameters)
    ratios = {
        "matrix_rate": 1.0,
        **{f"{name}_rate": parameters[f"{name}_ratio"] for name in ("embedding", "head", "scalar")},
    }
    setting = {name: parameters[name] for name in SPACE if name not in RATES}
    rates = {name: parameters["learning_rate"] * ratio for name, ratio in ratios.items()}
    return setting | {
        name: min(max(rate, RATES[name]["low"]), RATES[name]["high"]) for name, rate in rates.items()
    }


@dataclass
class Searched:
    """One search: of each trial its setting with `steps`, None where it was lost to memory."""

    settings: list[dict[str, Any] | None]
    bits: list[float]  # true ones, by the surrogate; NaN where lost
    measured: list[float]  # with the noise of a run; infinite where lost
    asks_s: list[float]


class Trial(Protocol):
    """What a search is told by: bits per byte as measured, None where the trial was lost."""

    def __call__(self, setting: Mapping[str, Any], device_batch: int) -> float | None: ...


def by_bsearch(way: str, seed: int, trials: int, run: Trial, asks_s: list[float]) -> None:
    """Search by `bsearch`, `bsearch-ratios`; `-timed` is told noisy seconds instead of knowing them."""
    from bsearch.search.suggest.ask_tell import Search

    def known_seconds(parameters: Mapping[str, Any]) -> float:
        return TIME_S if largest_device_batch(parameters) else math.nan  # type: ignore[arg-type]

    ratios = "ratios" in way
    rng = np.random.default_rng((seed, 1))
    search = Search(
        ONE_RATE if ratios else SPACE,
        rule="sqrt" if ratios else None,
        reference_batch=REFERENCE_BATCH,
        known_seconds=None if "timed" in way else known_seconds,
        direction="minimize",
        metric="bits",
        stopping="none",
        seed=seed,
    )
    for _ in range(trials):
        at = time.perf_counter()
        suggestion = search.ask()
        asks_s.append(time.perf_counter() - at)
        setting = with_rates(suggestion.parameters)
        bits = run(setting, largest_device_batch(setting))
        seconds = TIME_S * math.exp(0.01 * rng.standard_normal()) if "timed" in way else TIME_S
        search.tell(suggestion.number, seconds, bits, "complete" if bits is not None else "error")


def by_optuna(way: str, seed: int, trials: int, run: Trial, asks_s: list[float]) -> None:
    """Search by `tpe`, `gp`, `cmaes`, `random`: the device batch is one more parameter; `-planned`: it is planned as ours."""
    import optuna

    samplers = {
        "tpe": lambda: optuna.samplers.TPESampler(multivariate=True, seed=seed),
        "gp": lambda: optuna.samplers.GPSampler(seed=seed),
        "cmaes": lambda: optuna.samplers.CmaEsSampler(seed=seed),
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
    }
    planned = way.endswith("-planned")
    study = optuna.create_study(sampler=samplers[way.removesuffix("-planned")]())
    space = {
        name: optuna.distributions.IntDistribution(**domain)
        if isinstance(domain["low"], int)
        else optuna.distributions.FloatDistribution(**domain)
        for name, domain in (SPACE if planned else SPACE | {"device_batch": DEVICE_BATCH}).items()
    }
    for _ in range(trials):
        at = time.perf_counter()
        trial = study.ask(space)
        asks_s.append(time.perf_counter() - at)
        setting = {name: trial.params[name] for name in SPACE}
        most = largest_device_batch(setting)
        device_batch = most if planned else min(trial.params["device_batch"], setting["effective_batch"])
        bits = run(setting, device_batch) if device_batch <= most else run(setting, 0)
        study.tell(trial, bits, state=None if bits is not None else optuna.trial.TrialState.FAIL)


def searched(way: str, seed: int, trials: int, surrogate: Surrogate) -> Searched:
    rng, result = np.random.default_rng((seed, 2)), Searched([], [], [], [])

    def run(setting: Mapping[str, Any], device_batch: int) -> float | None:
        if device_batch < 1:
            result.settings.append(None)
            result.bits.append(math.nan)
            result.measured.append(math.inf)
            return None
        result.settings.append({**setting, "steps": steps_of(setting, device_batch)})
        result.bits.append(float(surrogate.bits([result.settings[-1]])[0]))
        result.measured.append(surrogate.run(result.bits[-1], rng))
        return result.measured[-1]

    (by_bsearch if way.startswith("bsearch") else by_optuna)(way, seed, trials, run, result.asks_s)
    return result


WAYS = [
    "random",
    "tpe",
    "tpe-planned",
    "cmaes",
    "bsearch",
    "bsearch-ratios",
    "bsearch-timed",
    "gp",
    "gp-planned",
]
AFTER = (10, 25, 50)


def best_after(result: Searched) -> list[float]:
    """The best true bits after so many trials; the worst possible where all were lost."""
    return [float(np.nanmin([*result.bits[:count], WORST])) for count in AFTER]


def cell(values: np.ndarray) -> str:
    return f"{values.mean():.4f} ± {values.std(ddof=1) / math.sqrt(len(values)):.4f}"


def compare(
    ways: list[str], seeds: int, surrogate: Surrogate, rows: list[dict[str, Any]]
) -> dict[str, list[Searched]]:
    """Search by each way, and print."""
    found: dict[str, list[Searched]] = {}
    reached: dict[str, np.ndarray] = {}
    print(f"{'bits after trials':<16}" + "".join(f"{count:>19}" for count in AFTER) + "     lost   ask ms")
    for way in ways:
        if way == "cmaes" and find_spec("cmaes") is None:
            print("cmaes: skipped, not installed")
            continue
        found[way] = [searched(way, seed, max(AFTER), surrogate) for seed in range(seeds)]
        reached[way] = np.array([best_after(result) for result in found[way]])
        lost = np.mean([np.isnan(result.bits) for result in found[way]])
        asks_ms = 1e3 * np.median([each for result in found[way] for each in result.asks_s[-5:]])
        figures = "  ".join(cell(column) for column in reached[way].T)
        print(f"{way:<16}  {figures}  {lost:7.1%}  {asks_ms:6.0f}", flush=True)
        for other in ("tpe", "tpe-planned"):
            if other in reached and way.startswith(("bsearch", "gp")):
                less = "  ".join(cell(column) for column in (reached[way] - reached[other]).T)
                print(f"{'   less ' + other:<16} {less}", flush=True)
    if {"bsearch", "bsearch-ratios"} <= set(reached):
        print(
            f"ratios after 25 less free rates after 50: {cell(reached['bsearch-ratios'][:, 1] - reached['bsearch'][:, 2])}"
        )
    if "random" in reached:
        known = min(float(surrogate.bits(rows).min()), *(float(values.min()) for values in reached.values()))
        middle = np.median(reached["random"], axis=0)
        print(f"share of the way from random search's median to the best known, {known:.3f}:")
        for way, values in reached.items():
            print(
                f"{way:<16}"
                + "".join(f"{share:7.2f}" for share in (middle - values.mean(axis=0)) / (middle - known))
            )
    return found


def verify(found: dict[str, list[Searched]], count: int) -> None:
    """Train the setting that each search measured as best of so many trials, with a seed of its own, and print."""
    import torch

    torch.set_num_threads(1)
    if {row["text"] for row in table()} != {text()[2]}:
        print("the table is of another text than that of docs/ now: not quite comparable")
    for way, results in found.items():
        true, predicted = [], []
        for result in results:
            best = int(np.argmin(result.measured[:count]))
            setting = result.settings[best]
            if setting is not None:
                true.append(trained(setting, setting["steps"], seed=77))
                predicted.append(result.bits[best])
        print(
            f"{way:<16}  trained anew after {count}: {cell(np.array(true))}, predicted {cell(np.array(predicted))}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--make", type=float, metavar="MINUTES", help="train and append to the table")
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--verify", action="store_true", help="also train the best setting of each search after 25 trials"
    )
    options = parser.parse_args()
    if options.make:
        make(options.make)
        return
    import optuna

    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = table()
    held_out(rows)
    found = compare(options.ways, options.seeds, Surrogate.of(rows), rows)
    if options.verify:
        verify(found, 25)


if __name__ == "__main__":
    main()
