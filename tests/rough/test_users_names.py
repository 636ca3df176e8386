"""Names that a task gives to its scores and facts, where ours stand too: kept apart, or refused by name."""

from __future__ import annotations

import csv
import json
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import bsearch
import pytest
from helpers import bsearch as entered
from users import SPACE, small_study

KIND = "a user's name among ours"

TASK = """
from bsearch import Measurement

def give(setup):
    named = GIVEN[setup.number - 1] if setup.number and setup.samples_budget > 24 else {}
    for part in (1, 2):
        seen = setup.samples_budget * part // 2
        yield Measurement(samples_seen=seen, elapsed_s=part / 8, accuracy=0.5 + setup.number / 1000, **named)
"""

# Columns of what we write, which a user's value of that name would replace.
OURS = (
    *(
        "learning_rate",
        "train_s",
        "effective_batch",
        "micro_batch",
        "accumulation",
        "devices",
        "rule",
        "epochs",
        "seed",
    ),
    *("device_s", "cost", "trial", "outcome", "on_front", "started_at", "ended_at", "message"),
    *(
        "attempts",
        "host",
        "samples_budget",
        "samples_per_s",
        "measured_train_s",
        "train_s_source",
        "train_s_error",
    ),
    *(
        "reference_rate",
        "baseline",
        "repeats",
        "runs",
        "price",
        "spent",
        "extra",
        "curve",
        "stopped_fraction",
    ),
    *("weight_decay", "elapsed_s", "train_loss", "samples_seen", "kind", "exponent", "device_kind", "curve"),
)


def trials(folder: Path, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of trials whose measurements are given these fields besides, one after the other."""
    (folder / "task.py").write_text(f"GIVEN = {given!r}\n{TASK}")
    study = small_study(
        task=f"{folder}/task.py:give",
        training={"samples": 400, "evaluations": 2},
        budget={"trials": len(given) + 1},
        stopping="none",
        sampler="random",
        storage=f"sqlite:///{folder}/names.db",
    )
    with suppress(Exception):
        bsearch.run(study, serial=True, progress=False)
    with closing(sqlite3.connect(folder / "names.db")) as connection:
        connection.row_factory = sqlite3.Row
        rows = [dict(row) for row in connection.execute("SELECT * FROM bsearch_trial ORDER BY number")]
    found = {row["number"]: {**row, "facts": json.loads(row["facts"])} for row in rows}
    return [found.get(number + 1, {"outcome": "never run", "facts": {}}) for number in range(len(given))]


@pytest.mark.parametrize("field", ["scores", "facts"])
def test_a_name_of_ours_is_refused(attack: Any, tmp_path: Path, field: str) -> None:
    found = trials(tmp_path, [{field: {name: 1234.5}} for name in OURS])
    for place, name in enumerate(OURS):
        with attack(f"{field}: {name}"):
            assert found[place]["outcome"] == "error", "it was accepted"
            assert name in found[place]["facts"]["message"] and "expected" in found[place]["facts"]["message"]


def test_a_fact_of_ours_has_its_type(attack: Any, tmp_path: Path) -> None:
    """Facts that a loop of one's own may report, as ours do, with a value that they cannot have."""
    names = (
        "peak_bytes",
        "ghost_batch",
        "waited_s",
        "throttled_s",
        "stolen_share",
        "steps",
    )
    for name in names:
        with attack(f"facts: {name}: text"):
            folder = tmp_path / name
            folder.mkdir()
            found = trials(folder, [{"facts": {name: "text"}}])[0]
            assert found["outcome"] == "error", "it was accepted"
            assert name in found["facts"]["message"] and "expected" in found["facts"]["message"]


def test_a_name_of_ones_own_is_kept(attack: Any, tmp_path: Path) -> None:
    names = [
        ("scores", "recall@5"),
        ("scores", "val_loss"),
        ("facts", "branch"),
        ("facts", "räume"),
        ("facts", "peak_bytes"),
    ]
    found = trials(tmp_path, [{field: {name: 1234}} for field, name in names])
    for place, (field, name) in enumerate(names):
        with attack(f"{field}: {name}"):
            assert found[place]["outcome"] == "complete"
            assert found[place]["facts"][name] == 1234
            assert found[place]["facts"]["learning_rate"] < 1


def test_two_values_of_one_name(attack: Any) -> None:
    cases = {
        "a score and a fact": {"accuracy": 0.5, "scores": {"a": 1.0}, "facts": {"a": 2.0}},
        "accuracy and a score": {"accuracy": 0.5, "scores": {"accuracy": 0.7}},
        "a name that is no text": {"accuracy": 0.5, "scores": {3: 0.7}},
        "an empty name": {"accuracy": 0.5, "scores": {"": 0.7}},
        "scores that are a list": {"accuracy": 0.5, "scores": [("a", 1.0)]},
        "facts that are None": {"accuracy": 0.5, "facts": None},
    }
    for name, values in cases.items():
        with attack(name):
            try:
                bsearch.Measurement(samples_seen=1, elapsed_s=1.0, **values)  # type: ignore[arg-type]
            except bsearch.TaskError as error:
                assert "expected" in str(error)
            else:
                raise AssertionError("it was accepted")


def test_a_metric_of_a_name_of_ours(attack: Any, tmp_path: Path) -> None:
    for name in ("learning_rate", "train_s", "trial", "seed", "outcome", "epochs", "task", "setup"):
        with attack(f"metric: {name}"):
            study = small_study(task="nowhere:Task", objectives={"metric": name})
            try:
                bsearch.run(
                    {**study, "storage": f"sqlite:///{tmp_path}/{name}.db"}, serial=True, progress=False
                )
            except bsearch.BsearchError as error:
                assert isinstance(error, bsearch.StudyFileError), str(error)
                assert "metric" in str(error) and "expected" in str(error) and name in str(error)


def test_tables_and_csv_of_a_metric_with_another_name(attack: Any, tmp_path: Path) -> None:
    """Where the metric is not accuracy, a column `accuracy` is that of a score, or none."""

    (tmp_path / "task.py").write_text(
        "from bsearch import Measurement\n"
        "def give(setup):\n"
        "    yield Measurement(setup.samples_budget, 1 + setup.number / 8, accuracy=0.25, "
        "scores={'f1': 0.5 + setup.number / 100})\n"
    )
    study = small_study(
        task=f"{tmp_path}/task.py:give",
        space=SPACE,
        training={"samples": 400, "evaluations": 1},
        budget={"trials": 3},
        objectives={"metric": "f1"},
    )
    (tmp_path / "study.yaml").write_text(json.dumps(study))
    assert entered("run", tmp_path / "study.yaml", "--serial").exit_code == 0
    with attack("front.csv has the metric, and its own accuracy"):
        front = list(csv.DictReader((tmp_path / "results" / "small" / "front.csv").read_text().splitlines()))
        assert all(float(row["f1"]) >= 0.5 for row in front)
        assert all(row.get("accuracy", "0.25") in ("0.25", "") for row in front)
    with attack("a trained point's log has both"):
        ran = entered("train", tmp_path / "study.yaml", "--serial", "--keep", tmp_path / "out")
        assert ran.exit_code == 0, ran.output
        log = list(csv.DictReader((tmp_path / "out" / "log.csv").read_text().splitlines()))
        assert (float(log[-1]["accuracy"]), float(log[-1]["f1"]) >= 0.5) == (0.25, True)
