"""Every value that a task, a loop or a study file can hand in, of every type: taken as it is, or refused where it enters."""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import closing, suppress
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import bsearch
import numpy as np
import pytest
import torch
from helpers import bsearch as entered
from users import SPACE, small_study

KIND = "a user's value of another type"
pytestmark = pytest.mark.long

# Those that are numbers have the value .5 where their type allows.
VALUES: dict[str, Any] = {
    "int": 1,
    "float": 0.5,
    "bool": True,
    "numpy float32": np.float32(0.5),
    "numpy float64": np.float64(0.5),
    "numpy int64": np.int64(1),
    "numpy bool": np.bool_(True),
    "torch scalar": torch.tensor(0.5),
    "torch scalar with a graph": torch.tensor(0.5, requires_grad=True),
    "torch bfloat16": torch.tensor(0.5, dtype=torch.bfloat16),
    "torch bool": torch.tensor(True),
    "0-d array": np.array(0.5),
    "array of one": np.array([0.5]),
    "tensor of one": torch.tensor([0.5]),
    "array of two": np.array([0.5, 0.5]),
    "tensor of two": torch.tensor([0.5, 0.5]),
    "text": "0.5",
    "None": None,
    "NaN": math.nan,
    "inf": math.inf,
    "1e308": 1e308,
    "a large int": 10**400,
    "Decimal": Decimal("0.5"),
    "Fraction": Fraction(1, 2),
    "complex": 0.5j,
    "torch complex": torch.tensor(0.5j),
    "dict": {"a": 0.5},
    "list": [0.5],
    "bytes": b"0.5",
    "object": object(),
}
NUMBERS = {
    name
    for name in VALUES
    if name.startswith(("int", "float", "numpy", "torch", "0-d")) and "bool" not in name
} - {"torch complex"}
MUST_REFUSE = {
    "array of two",
    "tensor of two",
    "complex",
    "torch complex",
    "dict",
    "list",
    "bytes",
    "object",
    "text",
}
PLAIN = (bool, int, float, str)


@pytest.mark.parametrize("field", ["samples_seen", "elapsed_s", "accuracy", "train_loss", "scores", "facts"])
def test_a_measurement(attack: Any, field: str) -> None:
    for name, value in VALUES.items():
        with attack(f"{field}: {name}"):
            given = {"samples_seen": 8, "elapsed_s": 1.0, "accuracy": 0.5}
            given |= {field: {"a": value} if field in ("scores", "facts") else value}  # type: ignore[dict-item]
            refused = MUST_REFUSE - ({"text"} if field == "facts" else set())
            try:
                made = bsearch.Measurement(**given)  # type: ignore[arg-type]
            except bsearch.TaskError as error:
                assert "expected" in str(error) and field.split("_")[0] in str(error)
                assert name not in NUMBERS or field == "samples_seen", str(error)
                continue
            assert name not in refused, "it was accepted"
            kept = getattr(made, field)
            kept = kept["a"] if isinstance(kept, dict) or hasattr(kept, "keys") else kept
            assert kept is None or type(kept) in PLAIN, type(kept)
            assert json.loads(json.dumps({"kept": kept})) is not None
            if name in NUMBERS:
                assert kept == float(value.detach() if isinstance(value, torch.Tensor) else value)


TASK = """
import math
from decimal import Decimal
from fractions import Fraction
import numpy as np, torch
from torch import nn
from torch.utils.data import TensorDataset
from bsearch import Data, Loop, Loss, Measurement, Score, Task, WholeSet
import sys
sys.path.insert(0, {rough!r})

def value(setup):
    if not setup.number or setup.samples_budget <= 24:
        return 0.5
    from test_users_values import VALUES
    return [*VALUES.values()][setup.number - 1]

def points(samples):
    inputs = torch.randn(samples, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())

class Given(Task):
    def data(self, setup):
        return Data(points(64), points(32))
    def model(self, setup):
        return nn.Linear(2, 2)
    def loss(self, model, batch, setup):
        made = super().loss(model, batch, setup)
        place, given = setup.parameters["place"], value(setup)
        return Loss(made.total, given if place == "denominator" else made.denominator)
    def score(self, model, batch, setup):
        place, given = setup.parameters["place"], value(setup)
        count = len(batch[1])
        match place:
            case "score.total": other = Score(given, 1)
            case "score.denominator": other = Score(1.0, given)
            case "score.of": other = Score(1.0, 1, of=lambda ratio: given)
            case "whole": other = WholeSet(lambda labels: given, batch[1])
            case _: other = Score(1.0, 1)
        return {{"accuracy": Score(count / 2, count), "other": other}}

def measures(setup):
    data, model = Data(points(64), points(32)), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate)
    loop = Loop(setup, data, models={{"model": model}}, optimizers={{"model": optimizer}})
    for step in loop:
        for part in step:
            (part.weight * nn.functional.cross_entropy(model(part.batch[0]), part.batch[1])).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.evaluates:
            yield loop.measure(accuracy=0.5, other=value(setup))

def schedule(fraction):
    import os
    from test_users_values import VALUES
    return VALUES[os.environ["SCHEDULE"]]

def clock(setup):
    kind = setup.parameters["kind"]
    times = {{"decreasing": (5.0, 1.0), "zero": (0.0, 0.0), "huge": (1.0, 1e308), "tiny": (1e-320, 2e-320)}}[kind]
    for part, elapsed_s in enumerate(times, start=1):
        yield Measurement(setup.samples_budget * part // 2, elapsed_s, accuracy=0.5 + setup.number / 100)

def score(setup):
    value = {{"max": 1e308, "min": -1e308, "mixed": (-1.0) ** setup.number * 1e308, "tiny": 5e-324}}[setup.parameters["kind"]]
    yield Measurement(setup.samples_budget, 1.0 + setup.number, accuracy=value)
"""


def ran(folder: Path, task: str, trials: int = 1, **changes: Any) -> bsearch.Study:
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(TASK.format(rough=str(Path(__file__).parent)))
    space = {**SPACE, **changes.pop("space", {})}
    study = small_study(
        study="values",
        task=f"{folder}/task.py:{task}",
        space=space,
        training={"evaluations": 1, "warmup": 0, **changes.pop("training", {})},
        budget={"trials": trials},
        storage=f"sqlite:///{folder}/values.db",
        stopping="none",
        sampler="random",
        **changes,
    )
    return bsearch.run(study, serial=True, progress=False)


@pytest.mark.parametrize(
    "place", ["score.total", "score.denominator", "score.of", "whole", "denominator", "measure"]
)
def test_what_a_task_returns(attack: Any, tmp_path: Path, place: str) -> None:
    task = "measures" if place == "measure" else "Given"
    training = {"accept_inexact": True} | ({"samples": 64} if place == "measure" else {})
    with suppress(Exception):
        ran(
            tmp_path,
            task,
            len(VALUES) + 1,
            space={} if place == "measure" else {"place": place},
            training=training,
        )
    with closing(sqlite3.connect(tmp_path / "values.db")) as connection:
        rows = connection.execute("SELECT number, outcome, facts FROM bsearch_trial").fetchall()
    for number, name in enumerate(VALUES):
        if place == "denominator" and name in ("1e308", "array of one", "NaN", "inf"):
            continue  # a denominator like any other, or a loss that diverges
        with attack(f"{place}: {name}"):
            outcome, facts = next((row[1], json.loads(row[2])) for row in rows if row[0] == number + 1)
            if outcome == "complete":
                assert name not in MUST_REFUSE, "it was accepted"
                continue
            assert outcome == "error" and name not in NUMBERS, facts["message"]
            assert "expected" in facts["message"], facts["message"]
            assert "Given." in facts["message"] or "easure" in facts["message"], facts["message"]


def test_a_schedule(attack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch scalar", "text", "tensor of two", "bool", "complex", "a large int"):
        with attack(f"schedule: {name}"):
            monkeypatch.setenv("SCHEDULE", name)
            folder = tmp_path / name.replace(" ", "-")
            try:
                ran(folder, "Given", space={"place": ""}, training={"schedule": f"{folder}/task.py:schedule"})
            except bsearch.BsearchError as error:
                assert "schedule" in str(error) and "expected" in str(error), str(error)
                assert name not in NUMBERS, str(error)
                continue
            assert name not in MUST_REFUSE, "it was accepted"


def test_the_users_line_is_named(attack: Any, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "import torch\nfrom bsearch import Measurement\n\ndef train(setup):\n"
        "    yield Measurement(setup.samples_budget, 1.0, accuracy=torch.tensor([0.5, 0.5]))\n"
    )
    study = small_study(
        task=f"{tmp_path}/task.py:train", space=SPACE, training={"samples": 64, "evaluations": 1}
    )
    study["budget"] |= {"trials": 1}
    with attack("a tensor of two"):
        try:
            bsearch.run({**study, "storage": f"sqlite:///{tmp_path}/line.db"}, serial=True, progress=False)
        except bsearch.BsearchError as error:
            assert "task.py:5" in str(error), str(error)


def test_seconds(attack: Any, tmp_path: Path) -> None:
    for kind in ("decreasing", "zero", "huge", "tiny"):
        with attack(f"elapsed_s: {kind}"):
            try:
                study = ran(tmp_path / kind, "clock", 4, space={"kind": kind}, training={"samples": 64})
            except bsearch.BsearchError as error:
                assert "elapsed_s" in str(error) and "expected" in str(error), str(error)
                continue
            assert kind == "tiny", "it was accepted"
            assert study.front.to_frame() is not None


def test_scores_at_the_ends_of_doubles(attack: Any, tmp_path: Path) -> None:

    for kind in ("max", "min", "mixed", "tiny"):
        with attack(f"accuracy: {kind}"):
            folder = tmp_path / kind
            folder.mkdir()
            (folder / "task.py").write_text(TASK.format(rough=str(Path(__file__).parent)))
            study = small_study(
                task="task.py:score",
                space={**SPACE, "kind": kind},
                training={"samples": 64, "evaluations": 1},
                budget={"trials": 8},
            )
            (folder / "study.yaml").write_text(json.dumps(study))
            result = entered("run", folder / "study.yaml", "--serial")
            assert result.exit_code == 0, result.output[-500:]
            assert (
                kind != "tiny"
                or json.loads((folder / "results" / "small" / "front.json").read_text())["front"]
            )
            assert kind == "tiny" or "8 diverged" in result.output


CHOICES = {
    ".inf": "finite",
    "-.inf": "finite",
    ".nan": "finite",
    "yes": "true",
    "no": "true",
    "Yes": "true",
    "on": "true",
    "OFF": "true",
}


def test_choices_of_a_study_file(attack: Any, tmp_path: Path) -> None:

    forms = {
        "a list": "  clip: [1.0, {}]\n",
        "choices": "  clip: {{choices: [1.0, {}]}}\n",
        "one value": "  clip: {}\n",
    }
    for form, text in forms.items():
        for written, hint in CHOICES.items():
            with attack(f"{form}: {written}"):
                file = tmp_path / "study.yaml"
                file.write_text(
                    "study: small\ntask: nowhere:Task\nspace:\n  effective_batch: {low: 16, high: 64}\n"
                    "  reference_rate: 0.1\n" + text.format(written) + "budget: {trials: 1, profile_s: 0}\n"
                )
                result = entered("run", file, "--serial")
                assert result.exit_code in (1, 2), result.output[-300:]
                assert (
                    "study.yaml:6" in result.output and "expected" in result.output and hint in result.output
                ), result.output[-500:]


def test_values_of_a_mapping(attack: Any, tmp_path: Path) -> None:
    """A study as a mapping in Python: a value that YAML has no word for is refused at its key, or taken as the number it is."""
    for name, value in VALUES.items():
        with attack(f"space: {name}"):
            space = {**SPACE, "clip": value}
            try:
                bsearch.run(
                    small_study(task="nowhere:Task", space=space, storage=f"sqlite:///{tmp_path}/a.db"),
                    serial=True,
                )
            except bsearch.StudyFileError as error:
                assert "clip" in str(error) and ("expected" in str(error) or name == "dict"), str(error)
                assert name not in NUMBERS, str(error)
            except bsearch.TaskError as error:
                assert "nowhere" in str(error)
                assert name not in (MUST_REFUSE | {"NaN", "inf"}) - {"text", "list"}, "it was accepted"
