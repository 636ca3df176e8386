"""`bsearch ask`, `import` and `init --from`, as their users type them."""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import yaml
from bsearch.cli import main
from click.testing import CliRunner, Result
from helpers import validated
from optuna.distributions import FloatDistribution, IntDistribution

EXPONENT = 0.5


def written(path: Path, count: int, *, seed: int = 0, **constant: Any) -> Path:
    """A table of runs whose best rate is 0.02 at batch 16, and grows with the root of the batch."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["run", "bs", "lr", "epochs", "val_acc", "runtime (min)", "seed", *constant])
        for place in range(count):
            batch = round(math.exp(rng.uniform(math.log(16), math.log(1024))))
            rate, epochs = math.exp(rng.uniform(math.log(0.003), math.log(1))), int(rng.choice([2, 5, 10]))
            away = math.log(rate / (0.02 * (batch / 16) ** EXPONENT))
            accuracy = (
                0.95
                - 0.02 * away**2
                - 0.2 / epochs
                - 0.3 * batch / 1000 / epochs
                + 0.003 * rng.standard_normal()
            )
            minutes = epochs * (10 + 2000 / batch) / 60
            row = [
                f"r{place}",
                batch,
                f"{rate:.5f}",
                epochs,
                f"{max(accuracy, 0.1):.4f}",
                f"{minutes:.3f}",
                place % 3,
            ]
            rows.writerow([*row, *constant.values()])
    return path


def typed(*words: str) -> Result:
    return CliRunner().invoke(main, [*words])


@pytest.mark.slow
def test_runs_say_what_they_can(tmp_path: Path) -> None:
    done = typed("ask", str(written(tmp_path / "runs.csv", 60, gpu="a100")))
    assert done.exit_code == 0, done.output
    for part in (
        "bs             effective_batch",
        "higher is better",
        "60 runs (60 complete)",
        "sqrt holds, constant and linear not",
        "critical batch: ",
        "noise: unknown: no setting was trained more than once",
        "0 diverged, 0 of them at a finite",
        "next runs that would add most (60 runs):",
    ):
        assert part in done.output, done.output


@pytest.mark.slow
def test_a_document_holds_intervals_that_hold_the_truth(tmp_path: Path) -> None:
    done = typed("ask", str(written(tmp_path / "runs.csv", 60)), "--json")
    (group,) = json.loads(done.stdout)["groups"]
    found = group["verdicts"]["best rate"]["data"]
    assert found["exponent"]["low"] <= EXPONENT <= found["exponent"]["high"]
    for rate in found["rates"]:
        true = 0.02 * (rate["effective_batch"] / 16) ** EXPONENT
        assert rate["learning_rate"]["low"] / 1.3 <= true <= 1.3 * rate["learning_rate"]["high"]
    assert len(group["verdicts"]["next runs"]["data"]["settings"]) == 5


def test_one_number_in_one_line(tmp_path: Path) -> None:
    path = str(written(tmp_path / "runs.csv", 60))
    done = typed("ask", path, "--batch", "500")
    assert done.output.count("\n") == 1
    assert done.output.startswith("best rate: 0.1")
    assert "at batch 500" in done.output
    assert (
        "the fit does not extrapolate beyond the batches tried"
        in typed("ask", path, "--batch", "5000").output
    )


def test_few_runs_are_met_with_silence(tmp_path: Path) -> None:
    done = typed("ask", str(written(tmp_path / "runs.csv", 4)))
    assert done.exit_code == 0
    assert "best rate: unknown: 20 complete runs are needed, got 4" in done.output
    assert "next runs: unknown" in done.output


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("bs", 32, "the batches differ too little, 32 to 32"),
        ("lr", 0.1, "expected rates that differ at the same batch, got none. Search a range of rates"),
    ],
)
def test_one_batch_or_one_rate_alone_says_why_it_is_silent(
    column: str, value: float, words: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "runs.csv", 40)
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    place = rows[0].index(column)
    for row in rows[1:]:
        row[place] = str(value)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    done = typed("ask", str(path), "--batch", "64")
    assert done.exit_code == 0, done.output
    assert f"best rate: {words}" in done.output


@pytest.mark.slow
def test_an_import_is_a_study_that_every_command_reads(tmp_path: Path) -> None:
    path, database = written(tmp_path / "runs.csv", 40), tmp_path / "old.db"
    done = typed("ask", str(path), "--save", str(database))
    assert done.exit_code == 0, done.output
    assert "study runs: 40 runs" in done.output
    url = f"sqlite:///{database}"
    document = json.loads(typed("show", url, "--json", "--all").stdout)
    assert len(document["all"]) == 40
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, trial in zip(rows, document["all"], strict=True):
        assert (trial["effective_batch"], trial["learning_rate"]) == (int(row["bs"]), float(row["lr"]))
        assert (trial["val_acc"], trial["train_s"]) == (
            float(row["val_acc"]),
            pytest.approx(60 * float(row["runtime (min)"])),
        )
    assert "It grows as the batch to the power of 0." in typed("ask", url).output
    again = typed("ask", str(path), "--save", str(database))
    assert (again.exit_code, "exists already; name another" in again.output) == (2, True), again.output
    # The study answers as its runs did.
    answer = typed("ask", str(path), "--batch", "300").output
    assert typed("ask", url, "--batch", "300").output == answer


def test_nothing_is_written_where_times_are_unknown(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("bs,lr,val_acc\n8,0.1,0.5\n16,0.2,0.6\n")
    done = typed("ask", str(path), "--save", str(tmp_path / "old.db"))
    assert done.exit_code == 2
    assert "expected the seconds of every complete run" in done.output
    assert [one.name for one in tmp_path.iterdir()] == ["runs.csv"]
    assert "front: unknown: not all runs have their seconds" in typed("ask", str(path)).output


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "jsonl"])
def test_the_answer_about_runs_is_as_published(kind: str, tmp_path: Path) -> None:
    table, path = written(tmp_path / "runs.csv", 8), tmp_path / f"same.{kind}"
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    texts = {"json": json.dumps(rows), "jsonl": "\n".join(map(json.dumps, rows)), "csv": table.read_text()}
    path.write_text(texts.get(kind) or texts["csv"].replace(",", "\t"))
    told = validated(typed("ask", str(path), "--batch", "64", "--json").output)
    read_as = {one["name"]: one["meaning"] for one in told["columns"]}
    assert (read_as["bs"], read_as["lr"], read_as["val_acc"]) == ("batch", "learning_rate", "metric")


def test_no_secret_of_a_source_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/old.db"
    study = optuna.create_study(storage=url, study_name="old", direction="maximize")
    of = {"batch_size": IntDistribution(8, 64), "lr": FloatDistribution(1e-3, 1.0, log=True)}
    for place in range(12):
        settings = {"batch_size": 8 + place, "lr": 0.01 * (place + 1)}
        study.add_trial(
            optuna.trial.create_trial(params=settings, distributions=of, value=0.9 - 0.01 * place)
        )
    done = typed("init", "next", "--from", f"optuna:{url}?cipher=hunter2#old")
    assert done.exit_code == 0, done.output
    assert {one.name for one in Path("next").iterdir() if "hunter2" in one.read_text()} == set()
    assert "hunter2" not in done.output


@pytest.mark.parametrize(
    "words",
    [
        ["--token=hunter2"],
        ["--password", "hunter2"],
        ["--db", "postgresql://a:hunter2@h/d"],
        ["db.password=hunter2"],
    ],
)
@pytest.mark.parametrize("command", ["init", "run"])
def test_a_secret_of_a_script_is_refused(
    command: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    done = typed(command, "--", "python", "train.py", "--lr", "0.1", *words)
    assert done.exit_code == 2
    assert "expected a script's arguments without a secret" in " ".join(done.output.split())
    assert "hunter2" not in done.output
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


def test_a_study_file_of_runs_can_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "runs.csv", 60)
    done = typed("init", "next", "--from", "runs.csv")
    assert done.exit_code == 0, done.output
    from bsearch.search.suggest.priors.warm_start import prior_trials
    from bsearch.spaces.study.file import read_study

    spec = read_study(tmp_path / "next" / "study.yaml")
    assert spec.warm_start == ("old-runs.jsonl",)
    assert len(prior_trials(spec, {}, lambda parameters: 1.0)) == 60
    assert (spec.space.rule.value, spec.objectives.metric.name) == ("sqrt", "val_acc")  # type: ignore[union-attr]
    prior = spec.space.reference_rate.expected
    assert prior is not None
    assert prior[0] == pytest.approx(0.02 * (spec.space.reference_batch / 16) ** EXPONENT, rel=0.4)
    assert len(spec.baseline) == 1


def searched(folder: Path) -> Path:
    """A study's folder, made of runs with parameters of several kinds."""
    names = "bs,lr,epochs,dropout,optimizer.momentum,layers,activation,val_loss,runtime"
    rows = [
        f"{8 << place % 4},0.0{place % 7 + 1},{place % 3 + 1},0.{place % 4},0.{place % 5 + 5},{place % 2 + 1},"
        f"{['relu', 'gelu'][place % 2]},1.{place * 37 % 11},{place * 13 % 17 + 5}"
        for place in range(24)
    ]
    (folder / "runs.csv").write_text("\n".join([names, *rows]) + "\n")
    done = typed("init", str(folder / "new"), "--from", str(folder / "runs.csv"))
    assert done.exit_code == 0, done.output
    return folder / "new"


def test_the_tasks_file_of_runs_has_their_names(tmp_path: Path) -> None:
    code = searched(tmp_path).joinpath("tasks.py").read_text()
    compile(code, "tasks.py", "exec")
    for line in (
        'dropout = float(setup.parameters["dropout"])',
        'optimizer_momentum = float(setup.parameters["optimizer_momentum"])',
        'layers = int(setup.parameters["layers"])',
        'activation = setup.parameters["activation"]',
        "val_loss, the metric of study.yaml (lower is better)",
        "return Score(val_loss, len(labels))",
    ):
        assert line in code, code


@pytest.mark.long
def test_a_study_of_runs_says_what_is_to_be_filled_in_and_is_complete_then(tmp_path: Path) -> None:
    folder = searched(tmp_path)
    tasks = folder / "tasks.py"

    def check() -> str:
        done = subprocess.run(
            [sys.executable, "-m", "bsearch", "check", str(folder / "study.yaml")],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    def filled(start: str, lines: str) -> None:
        code = tasks.read_text()
        line = next(line for line in code.splitlines(keepends=True) if f"filled in: {start} here" in line)
        tasks.write_text(code.replace(line, lines))

    assert check() == f"tasks.py is to be filled in: data here, then model below it ({tasks}:11)\n"
    filled("data", "        train = validation = [(torch.randn(4), place % 2) for place in range(64)]\n")
    assert check() == f"tasks.py is to be filled in: model here, a torch.nn.Module ({tasks}:20)\n"
    filled("model", "        return nn.Sequential(nn.Linear(4, 2), nn.Dropout(dropout))\n")
    assert "val_loss" in check()


@pytest.mark.parametrize(
    ("metric", "said"), [("val_bleu", "score here, val_bleu of a batch"), ("val_acc", "argmax(-1) == labels")]
)
def test_a_metric_that_is_no_usual_one_is_left_to_be_filled_in(
    metric: str, said: str, tmp_path: Path
) -> None:
    text = written(tmp_path / "runs.csv", 12).read_text().replace("val_acc", metric)
    (tmp_path / "runs.csv").write_text(text)
    assert typed("init", str(tmp_path / "new"), "--from", str(tmp_path / "runs.csv")).exit_code == 0
    assert said in (tmp_path / "new" / "tasks.py").read_text()


def test_more_sizes_than_can_be_timed_are_said_at_once(tmp_path: Path) -> None:
    rows = [f"8,0.0{place % 7 + 1},0.{place % 9 + 1},{place % 5},{place // 5 % 5}" for place in range(50)]
    (tmp_path / "runs.csv").write_text("\n".join(["bs,lr,val_acc,width,depth", *rows]))
    done = typed("init", str(tmp_path / "new"), "--from", str(tmp_path / "runs.csv"))
    assert "study.yaml needs editing before it can run:\nstudy.yaml:" in done.output
    assert "expected at most 16 combinations of values with changes_cost" in done.output


def test_one_run_is_counted_as_one(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("bs,lr,val_acc,runtime\n8,0.1,0.5,3\n16,0.2,,\n")
    done = typed("ask", str(tmp_path / "runs.csv"))
    for said in (
        ": 1 run (1 complete)",
        "front: 1 of 1 is on the front (1 run)",
        "left out: 1 without val_acc",
    ):
        assert said in done.output, done.output
    (tmp_path / "runs.csv").write_text("bs,lr,val_acc,runtime\n8,0.1,0.5,3\n16,0.2,0.4,9\n32,0.1,0.6,\n")
    assert "1 of them does not have its seconds, runs.csv:4" in typed(
        "ask", str(tmp_path / "runs.csv")
    ).output.replace(str(tmp_path) + "/", "")
    (tmp_path / "runs.csv").write_text("bs,lr,val_acc,runtime\n8,0.1,0.5,3\n16,0.2,0.4,9\n")
    done = typed("ask", str(tmp_path / "runs.csv"))
    assert "front: 1 of 2 is on the front; the other was beaten by one that was as fast" in done.output, (
        done.output
    )


def test_of_runs_that_are_as_good_the_fastest_counts_then_the_earliest(tmp_path: Path) -> None:
    rows = ["r0,8,0.1,0.9,30", "r1,16,0.1,0.9,10", "r2,32,0.1,0.9,10", "r3,64,0.1,0.8,20"]
    (tmp_path / "runs.csv").write_text("\n".join(["run,bs,lr,val_acc,runtime", *rows]))
    typed("init", str(tmp_path / "new"), "--from", str(tmp_path / "runs.csv"))
    assert (
        yaml.safe_load((tmp_path / "new" / "study.yaml").read_text())["baseline"][0]["effective_batch"] == 16
    )
    verdicts = json.loads(typed("ask", str(tmp_path / "runs.csv"), "--json").stdout)["groups"][0]["verdicts"]
    assert verdicts["front"]["data"]["members"][0] == 1


@pytest.mark.slow
def test_python_reads_them_too(tmp_path: Path) -> None:
    import bsearch

    path = written(tmp_path / "runs.csv", 60)
    with path.open(newline="") as file:
        rows = [
            {name: float(value) if name != "run" else value for name, value in row.items()}
            for row in csv.DictReader(file)
        ]
    for place, runs in enumerate((path, rows)):
        study = bsearch.Study.of(runs, to=tmp_path / f"{place}.db")
        answers = {one.about: one for one in study.verdicts([500])}
        assert "at batch 500" in answers["best rate"].text
        assert len(study.trials) == 60
    with pytest.raises(bsearch.StudyFileError, match="exists already"):
        bsearch.Study.of(path, to=tmp_path / "0.db")


def test_what_is_unclear_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("bs,lr,val_acc,val_f1\n8,0.1,0.5,0.1\n16,0.2,0.6,0.7\n")
    for words in (("ask", str(path)), ("init", str(tmp_path / "new"), "--from", str(path))):
        done = typed(*words)
        assert done.exit_code == 2
        assert (
            "expected one metric, got val_acc, val_f1. Write --metric val_acc or --metric val_f1."
            in done.output
        )
        # What is clear is shown before.
        assert "lr       learning_rate" in done.output.partition("expected one metric")[0], done.output
        assert "val_f1   metric?" in done.output
    assert [one.name for one in tmp_path.iterdir()] == ["runs.csv"]
    assert typed("ask", str(path), "--metric", "val_f1").exit_code == 0


def curves(folder: Path) -> Path:
    """Lightning's files of runs with two metrics, one of which has a name that does not tell its direction."""
    for place in range(3):
        version = folder / f"version_{place}"
        version.mkdir(parents=True)
        version.joinpath("hparams.yaml").write_text(f"batch_size: {8 << place}\nlr: 0.{place + 1}\n")
        version.joinpath("metrics.csv").write_text(
            f"epoch,val_loss,val_gap\n0,2.0,1\n1,1.{place},3\n2,1.{place + 5},{place}\n"
        )
    return folder


def test_all_metrics_are_named_as_they_are_typed_with_the_best_of_their_curves(tmp_path: Path) -> None:
    folder = str(curves(tmp_path / "logs"))
    done = typed("ask", folder)
    assert done.exit_code == 2
    assert "val_loss    metric?" in done.output.partition("expected one metric")[0]
    assert (
        "Write --metric val_loss, --metric 'val_loss (lowest)', --metric val_gap, --metric 'val_gap (lowest)' or --metric "
        "'val_gap (highest)'."
    ) in done.output
    unclear = typed("ask", folder, "--metric", "val_gap")
    assert re.search(
        r"val_gap +metric +lower or higher is better\?", unclear.output.partition("Write --metric")[0]
    )
    assert typed("ask", folder, "--metric", "val_loss (lowest)").exit_code == 0
    assert typed("ask", folder, "--metric", "val_gap:minimize").exit_code == 0
    document = typed("ask", folder, "--json")
    assert (document.exit_code, document.stdout) == (2, "")


def test_what_is_unclear_is_asked_for_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bsearch.commands import ask

    monkeypatch.setattr(ask, "_is_asked", lambda: True)
    done = CliRunner().invoke(
        main, ["ask", str(curves(tmp_path / "logs"))], input="val_gap (highest)\nmaximize\n"
    )
    assert done.exit_code == 0, done.output
    first, asked, rest = done.output.partition("metric (val_loss, val_loss (lowest), val_gap")
    assert asked and "val_loss    metric?" in first
    assert "direction (minimize, maximize): maximize" in rest
    assert re.search(r"val_gap \(highest\) +metric +higher is better; as you chose", rest)


OLD = Path(__file__).parent.parent / "examples" / "old-runs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "runs", "holds"),
    [
        ("digits.csv", 48, "sqrt and linear hold"),
        ("cifar10.jsonl", 60, "sqrt holds"),
        ("lightning_logs", 24, "4 of them at a finite"),
    ],
)
def test_the_examples_answer(source: str, runs: int, holds: str) -> None:
    done = typed("ask", str(OLD / source))
    assert done.exit_code == 0, done.output
    assert f": {runs} runs (" in done.output
    assert holds in done.output


def to_target(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def needed(batch: int, seed: int) -> float:
    """Epochs to a target: twice as many at batch 256, and 5 % apart by the seed."""
    return float(
        10 * (1 + batch / 256) * math.exp(0.05 * np.random.default_rng((batch, seed)).standard_normal())
    )


def zeus_like(
    targets: dict[float, float], batches: tuple[int, ...] = (16, 64, 256, 1024)
) -> list[dict[str, Any]]:
    """Runs with the columns of Zeus's tables, by target and its factor of epochs; batch 1024 never reaches any."""
    rows: list[dict[str, Any]] = []
    for target, times in targets.items():
        for batch, run, limit in product(batches, range(4), (100, 200)):
            rows.append(
                {
                    **{
                        "network": "resnet",
                        "batch_size": batch,
                        "learning_rate": 0.1,
                        "run": run,
                        "target_metric": target,
                    },
                    "target_epoch": "nan" if batch == 1024 else round(times * needed(batch, run), 2),
                    **{
                        "power_limit": limit,
                        "time_per_epoch": 3000 / batch * (300 - limit),
                        "average_power": limit,
                    },
                }
            )
    return rows


def test_runs_to_a_target_say_what_was_the_fastest_and_the_critical_batch(tmp_path: Path) -> None:
    path = str(to_target(tmp_path / "zeus.csv", zeus_like({0.8: 1.0}, (16, 64, 128, 256, 512, 1024))))
    assert validated(typed("ask", path, "--json").output)["columns"]
    done = typed("ask", path)
    assert done.exit_code == 0, done.output
    for part in (
        "lower is better; epochs to target",
        "target_epoch x time_per_epoch",
        "average_power      left out         a result",
        "48 runs (40 complete, 8 never reached the target)",
        "reached: 8 of 48 never reached the target",
        "batch 1024 is left out of the law",
        "front: batch 512, power_limit 200 was the fastest: ",
        "best batch: 512, ",
        "best rate: unknown: runs of several learning rates are needed",
    ):
        assert part in done.output, done.output
    (group,) = json.loads(typed("ask", path, "--json").stdout)["groups"]
    (fastest,) = group["verdicts"]["front"]["data"]["settings"]
    taken = np.median([needed(512, run) for run in range(4)]) * 3000 / 512 * 100
    assert fastest == {"setting": "batch 512, power_limit 200", "seconds": pytest.approx(taken, rel=1e-3)}
    assert group["verdicts"]["best batch"]["data"]["seconds"]["value"] == fastest["seconds"]
    low, _, high = group["verdicts"]["critical batch"]["data"]["estimate"]
    assert low <= 256 <= high
    # The same runs under another power limit are no other seeds.
    assert group["verdicts"]["noise"]["runs"] == 20
    (group,) = json.loads(typed("ask", path, "--batch", "100", "--json").stdout)["groups"]
    (found,) = group["verdicts"]["epochs to target"]["data"]["predicted"]
    assert found["low"] <= 10 * (1 + 100 / 256) <= found["high"]


def test_targets_are_told_apart_and_one_that_no_run_reached_is_named(tmp_path: Path) -> None:
    path = str(to_target(tmp_path / "zeus.csv", zeus_like({0.7: 0.5, 0.8: 1.0, 0.9: math.nan})))
    done = typed("ask", path)
    assert done.exit_code == 0, done.output
    assert "zeus.csv: 0.7: 32 runs" in done.output
    assert "zeus.csv: 0.8: 32 runs" in done.output
    assert "left out: 32 of groups without any result, such as 0.9" in done.output


def test_one_batch_to_a_target_is_met_with_silence(tmp_path: Path) -> None:
    done = typed("ask", str(to_target(tmp_path / "zeus.csv", zeus_like({0.8: 1.0}, (64,)))))
    assert done.exit_code == 0, done.output
    assert (
        "critical batch: unknown: runs that reach the target at 3 batches are needed, there is 64"
        in done.output
    )
    assert "next runs: unknown" in done.output
    assert "best batch: unknown: only batch 64 reached the target" in done.output


def test_a_cell_of_several_runs_is_read_as_mlperf_writes_it(tmp_path: Path) -> None:
    rows = [
        {
            **{"workload": "bert", "round": name, "effective_batch": batch},
            "to_target": " ".join(f"{1e5 * times * needed(batch, seed):.0f}" for seed in range(5)),
        }
        for name, times in (("v4", 1.0), ("v5", 0.8))
        for batch in (64, 256, 1024)
    ]
    path = str(to_target(tmp_path / "mlperf.csv", rows))
    done = typed("ask", path)
    assert done.exit_code == 0, done.output
    assert "30 runs (30 complete)" in done.output
    assert "front: unknown: the seconds to the target are not known of every run" in done.output
    (group,) = json.loads(typed("ask", path, "--json").stdout)["groups"]
    low, _, high = group["verdicts"]["critical batch"]["data"]["estimate"]
    assert low <= 256 <= high
    predicted = typed("ask", path, "--batch", "128").output
    assert "at batch 128 (v4)" in predicted
    assert "at batch 128 (v5)" in predicted


def test_a_metric_beside_a_count_to_the_target_is_used_only_where_it_is_named(tmp_path: Path) -> None:
    rows = [
        {
            "bs": batch,
            "lr": 0.1,
            "val_acc": 0.8 + 0.001 * batch / 64,
            "steps_to_target": needed(batch, 0) * 1000 / batch,
        }
        for batch in (32, 64, 128)
    ]
    path = str(to_target(tmp_path / "runs.csv", rows))
    done = typed("ask", path)
    assert "runs are compared by steps_to_target; --metric val_acc compares by it" in done.output, done.output
    assert "the batch that needs twice the samples of small ones" in done.output
    assert "steps_to_target" not in typed("ask", path, "--metric", "val_acc").output.partition("3 runs")[2]


def test_seconds_to_a_target_alone_do_not_say_how_much_data_that_took(tmp_path: Path) -> None:
    rows = [
        {"bs": batch, "lr": 0.1, "seed": seed, "tta (min)": needed(batch, seed)}
        for batch in (16, 64, 256)
        for seed in (0, 1)
    ]
    done = typed("ask", str(to_target(tmp_path / "runs.csv", rows)))
    assert done.exit_code == 0, done.output
    assert "best batch: 16, " in done.output
    assert "critical batch: unknown: samples, epochs or steps to the target are needed" in done.output


def test_settings_that_are_as_fast_are_all_named(tmp_path: Path) -> None:
    rows = [
        {"bs": batch, "lr": 0.1, "epochs_to_target": 3, "time_to_target": max(batch, 64)}
        for batch in (32, 64, 128)
    ]
    path = str(to_target(tmp_path / "runs.csv", rows))
    assert (
        "front: batch 32; batch 64 were the fastest: 64 s (median of the runs of each)"
        in typed("ask", path).output
    )
    (group,) = json.loads(typed("ask", path, "--json").stdout)["groups"]
    assert [one["setting"] for one in group["verdicts"]["front"]["data"]["settings"]] == [
        "batch 32",
        "batch 64",
    ]


def with_energy(counted: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs of two settings, with columns of energy and power that differ between those of one."""
    costs = [
        ("energy_to_accuracy", 900.0),
        ("energy_to_target_kj", 5.0),
        ("average_power", 100.0),
        ("energy_j", 7.0),
    ]
    return [
        {"bs": batch, "lr": 0.1, **counted, **{name: value + place // 2 for name, value in costs}}
        for place, batch in enumerate((16, 64) * 4)
    ]


@pytest.mark.parametrize("counted", ["epochs_to_target", "val_loss"])
def test_energy_and_power_say_nothing_of_a_run(counted: str, tmp_path: Path) -> None:
    path = str(to_target(tmp_path / "runs.csv", with_energy({counted: 3.0})))
    done = typed("ask", path, "--json")
    assert done.exit_code == 0, done.output
    columns = {column["name"]: column for column in json.loads(done.stdout)["columns"]}
    assert columns[counted]["meaning"] == "metric"
    for name in ("energy_to_accuracy", "energy_to_target_kj", "average_power", "energy_j"):
        assert (columns[name]["meaning"], columns[name]["why"]) == ("nothing", "a result")
    assert not {"seconds", "parameter", "group"} & {column["meaning"] for column in columns.values()}
