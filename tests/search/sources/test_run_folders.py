"""Runs that Optuna, Trainer, Lightning and Tune left on disk, each made by its own library."""

from __future__ import annotations

import json
import math
import os
import pickle
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import yaml
from bsearch.search.sources.readers import lightning, trainer, tune
from bsearch.search.sources.readers import optuna as optuna_reader
from bsearch.search.sources.runs import Run
from bsearch.spaces.errors import StudyFileError
from torch import nn


def refused(read: Callable[[str], Iterator[Run]], source: object) -> str:
    with pytest.raises(StudyFileError) as caught:
        list(read(str(source)))
    return str(caught.value)


# ---------------------------------------------------------------- Optuna


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/studies.db"


def made_study(url: str, name: str = "first", **options: Any) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(
        study_name=name, storage=url, sampler=optuna.samplers.RandomSampler(0), **options
    )


def test_trials_are_read_with_what_became_of_them(url: str) -> None:
    study = made_study(url)

    def objective(trial: optuna.Trial) -> float:
        lr = trial.suggest_float("lr", 1e-3, 0.1, log=True)
        trial.suggest_categorical("optimizer", ["adam", "sgd"])
        for step, value in enumerate([3.0, 1.0, 2.0]):
            trial.report(value, step)
        trial.set_user_attr("accuracy", 0.5 + lr)
        trial.set_user_attr("ignored", None)
        if trial.number == 1:
            raise optuna.TrialPruned
        if trial.number == 2:
            raise ArithmeticError
        return 7.0

    study.optimize(objective, n_trials=3, catch=ArithmeticError)
    study.ask()
    study.enqueue_trial({"lr": 0.01})
    theirs = study.trials
    runs = list(optuna_reader.read(url))
    assert runs == list(optuna_reader.read(f"{url}#first"))
    assert [run.place for run in runs] == [f"trial {number} of study first" for number in range(4)]
    assert [run.status for run in runs] == ["finished", "finished", "failed", "running"]
    assert [run.settings for run in runs] == [trial.params for trial in theirs[:4]]
    curve = {"intermediate": 2.0, "intermediate (lowest)": 1.0, "intermediate (highest)": 3.0}
    for trial, run, own in zip(
        theirs, runs[:3], [{"value": 7.0}, {"pruned": True, "value": 2.0}, {}], strict=False
    ):
        assert isinstance(trial.duration, timedelta)
        common = {"duration_s": trial.duration.total_seconds()}
        common["direction of value"] = "minimize"
        assert run.results == {**curve, **common, **own}
    assert runs[3].results == {"direction of value": "minimize"}


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("names", [None, ["loss", "seconds"]])
def test_several_values_are_called_by_their_names_if_they_have_any(url: str, names: list[str] | None) -> None:
    study = made_study(url, directions=["minimize", "maximize"])
    if names:
        study.set_metric_names(names)
    study.optimize(lambda trial: (1.0, 2.0), n_trials=1)
    (run,) = optuna_reader.read(url)
    first, second = names or ["value_0", "value_1"]
    expected = {
        first: 1.0,
        second: 2.0,
        f"direction of {first}": "minimize",
        f"direction of {second}": "maximize",
    }
    assert {name: value for name, value in run.results.items() if name != "duration_s"} == expected


def test_of_several_studies_one_is_named(url: str) -> None:
    made_study(url).enqueue_trial({"lr": 0.1})
    assert "studies.db: expected trials, got none that has begun in study first" in refused(
        optuna_reader.read, url
    )
    made_study(url, "other#1@x", direction="maximize").optimize(lambda trial: 1.0, n_trials=1)
    (run,) = optuna_reader.read(f"{url}#other#1@x")
    assert run.results["direction of value"] == "maximize"
    assert refused(optuna_reader.read, url).endswith(
        "studies.db: expected one study, got first, other#1@x. Name one: URL#STUDY"
    )
    message = refused(optuna_reader.read, f"{url}#firts")
    assert message.endswith(
        "expected a study of this storage (first, other#1@x), got 'firts'. Did you mean 'first'?"
    )


def test_a_storage_stays_as_it_is(url: str, tmp_path: Path) -> None:
    assert "studies.db: expected an Optuna storage, got no file /" in refused(optuna_reader.read, url)
    assert os.listdir(tmp_path) == []
    path = tmp_path / "studies.db"
    path.write_bytes(b"no database" * 100)
    assert "expected Optuna's tables: " in refused(optuna_reader.read, url)
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    assert "expected Optuna's tables: " in refused(optuna_reader.read, url)
    path.unlink()
    made_study(url).optimize(lambda trial: 1.0, n_trials=1)
    before = path.read_bytes()
    path.chmod(0o400)
    assert len(list(optuna_reader.read(url))) == 1
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, ["studies.db"])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("studies.db", "expected an SQLAlchemy URL such as sqlite:///study.db"),
        ("nosuch://a/b#c", "no such kind of database"),
        ("sqlite://", "no such database yet"),
        ("postgresql+psycopg://ann:s3#cret@127.0.0.1:1/x#study", "expected Optuna's tables: "),
    ],
)
def test_what_is_no_storage_is_refused_without_its_password(source: str, words: str) -> None:
    if source.startswith("postgres"):
        pytest.importorskip("psycopg")
    message = refused(optuna_reader.read, source)
    assert words in message
    assert "s3" not in message and "cret" not in message


# ---------------------------------------------------------------- Hugging Face's Trainer


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.frameworks
def test_trainings_of_the_trainer_are_read_by_their_folders(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason=".[huggingface] is not installed")
    data = [{"x": torch.ones(4) * index, "labels": index % 2} for index in range(16)]

    def train(name: str, **options: Any) -> Any:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "sweep" / name), per_device_train_batch_size=4, gradient_accumulation_steps=2,
            eval_strategy="epoch", save_strategy="epoch", logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True,
            lr_scheduler_type="cosine", weight_decay=0.01, warmup_steps=1, hub_token="hf_x", **options,  # noqa: S106
        )  # fmt: skip
        made = transformers.Trainer(Linear(), arguments, train_dataset=data, eval_dataset=data)
        made.train()
        return made

    saved = train("saved", learning_rate=0.01, num_train_epochs=2, seed=7)
    saved.save_state()
    checkpoints = train("checkpoints", learning_rate=0.02, num_train_epochs=3)
    first, second = trainer.read(str(tmp_path))
    assert (first.place, second.place) == (f"{tmp_path}/sweep/checkpoints", f"{tmp_path}/sweep/saved")
    expected = {
        "learning_rate": 0.01, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
        "weight_decay": 0.01, "warmup_steps": 1, "seed": 7, "lr_scheduler_type": "cosine", "eval_strategy": "epoch",
        "world_size": 1, "max_steps": 4, "train_batch_size": 4,
    }  # fmt: skip
    assert {name: second.settings[name] for name in expected} == expected
    assert (first.settings["learning_rate"], first.settings["num_train_epochs"]) == (0.02, 3)
    assert "hub_token" not in second.settings
    for run, made in ((first, checkpoints), (second, saved)):
        losses = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
        ends = (losses[-1], min(losses), max(losses))
        assert tuple(run.results[f"eval_loss{end}"] for end in ("", " (lowest)", " (highest)")) == ends
        assert (run.status, run.results["global_step"], run.results["epoch"]) == (
            "finished",
            2 * len(losses),
            len(losses),
        )
    last = saved.state.log_history[-1]
    assert (
        second.results["train_loss"] == last["train_loss"]
        and second.results["train_runtime"] == last["train_runtime"]
    )
    assert "train_loss" not in first.results  # of which its checkpoints know nothing
    assert [run.place for run in trainer.read(f"{tmp_path}/sweep/saved")] == [second.place]


STATE = {"global_step": 4, "max_steps": 8, "epoch": 0.5, "train_batch_size": 4, "num_train_epochs": 1}
HISTORY = [{"eval_loss": 2.0, "step": 2}, {"eval_loss": 1.0, "step": 3}, {"eval_loss": math.nan, "step": 4}]


def made_training(folder: Path, **state: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({**STATE, "log_history": HISTORY, **state}))
    return folder


def pickled(folder: Path, data: bytes) -> None:
    with zipfile.ZipFile(folder / "training_args.bin", "w") as archive:
        archive.writestr("training_args/data.pkl", data)


def test_the_last_checkpoint_counts_where_the_training_has_no_state_of_its_own(tmp_path: Path) -> None:
    for step in (4, 20, 100):
        made_training(tmp_path / "out" / f"checkpoint-{step}", global_step=step, max_steps=1000)
    (tmp_path / "out" / "checkpoint-200").mkdir()  # being written
    (tmp_path / "out" / "args.json").write_text(
        '{"learning_rate": 0.1, "optimizer": {"api_key": "x", "beta": 0.9}}'
    )
    (tmp_path / "out" / "all_results.json").write_text('{"train_loss": 0.25}')
    (run,) = trainer.read(str(tmp_path))
    settings = {
        "train_batch_size": 4,
        "num_train_epochs": 1,
        "max_steps": 1000,
        "learning_rate": 0.1,
        "optimizer.beta": 0.9,
    }
    assert (run.settings, run.status) == (settings, "")
    results = {name: value for name, value in run.results.items() if value == value}
    ends = {"eval_loss (lowest)": 1.0, "eval_loss (highest)": 2.0}
    assert results == {"train_loss": 0.25, "global_step": 100, "epoch": 0.5, **ends}
    assert math.isnan(run.results["eval_loss"])  # type: ignore[arg-type]


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Arguments:
    def __init__(self, **values: Any) -> None:
        self.__dict__ |= values


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    folder, gone = made_training(tmp_path / "out"), tmp_path / "attacked"
    pickled(
        folder,
        pickle.dumps(Arguments(learning_rate=0.5, bad=Attack(gone), state={"a": 1}, many={1, 2}, seed=3)),
    )
    (run,) = trainer.read(str(tmp_path))
    assert {name: run.settings[name] for name in ("learning_rate", "seed", "state.a")} == {
        "learning_rate": 0.5,
        "seed": 3,
        "state.a": 1,
    }
    pickled(folder, pickle.dumps(Attack(gone)))
    assert "training_args.bin: expected TrainingArguments as torch.save writes them" in refused(
        trainer.read, tmp_path
    )
    assert not gone.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"cos\nsystem\n(S'x'\ntR",
        b"\x80\x04]r\xff\xff\xff\x7f.",
        b"\x80\x04X\xff\xff\xff\xff",
        b"\x80\x04Q.",
        bytes(1 << 23),
    ],
)
def test_arguments_that_are_damaged_are_refused(tmp_path: Path, data: bytes) -> None:
    pickled(made_training(tmp_path / "out"), data)
    message = refused(trainer.read, tmp_path)
    assert message.startswith(f"{tmp_path}/out/training_args.bin: expected TrainingArguments")


def test_states_that_are_damaged_are_refused(tmp_path: Path) -> None:
    assert refused(trainer.read, tmp_path / "none").endswith(
        "none: expected a folder that can be read: No such file or directory"
    )
    assert "expected the output_dir of a Trainer, or a folder of them; got no trainer_state.json" in refused(
        trainer.read, tmp_path
    )
    path = made_training(tmp_path / "out") / "trainer_state.json"
    (tmp_path / "out" / "training_args.bin").write_bytes(b"PK\x03\x04")
    assert "BadZipFile" in refused(trainer.read, tmp_path)
    for text, words in {
        '{\n"global_step": 1,\n"ep': ":3: expected JSON, got a damaged file: ",
        "[1]": ":1: expected a JSON object, got list",
        '{"log_history": 5}': ": expected a state as Trainer writes it",
        '{"log_history": ["x"]}': ": expected a state as Trainer writes it",
        '{"max_steps": "x"}': ": expected a state as Trainer writes it",
        '{"a":' * 100_000: ":1: expected JSON, got a damaged file: ",
        "\xff": ":1: expected JSON",
    }.items():
        path.write_text(text, encoding="latin-1")
        (tmp_path / "out" / "training_args.bin").unlink(missing_ok=True)
        assert f"{path}{words}" in refused(trainer.read, tmp_path)


# ---------------------------------------------------------------- Lightning


@pytest.mark.frameworks
def test_versions_of_lightnings_logger_are_read(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason=".[lightning] is not installed")
    from lightning.pytorch.loggers import CSVLogger

    for version, lr in enumerate([0.1, 1e-5]):
        logger = CSVLogger(str(tmp_path), flush_logs_every_n_steps=1)
        logger.log_hyperparams(
            {"lr": np.float64(lr), "batch_size": 32, "optimizer": {"name": "adam", "betas": (0.9, 0.99)}}
        )
        for step, loss in enumerate([3.0, 1.0, 2.0]):
            logger.log_metrics({"train_loss": loss, "epoch": step}, step)
        logger.log_metrics({"val_acc": 0.5 + version / 4, "epoch": 2}, 2)
        logger.finalize("success")
    runs = list(lightning.read(str(tmp_path)))
    assert [run.place for run in runs] == [
        f"{tmp_path}/lightning_logs/version_{version}" for version in (0, 1)
    ]
    common = {"batch_size": 32, "optimizer.name": "adam", "optimizer.betas.0": 0.9, "optimizer.betas.1": 0.99}
    assert [run.settings for run in runs] == [{"lr": 0.1, **common}, {"lr": 1e-5, **common}]
    curve = {
        "train_loss": 2.0,
        "train_loss (lowest)": 1.0,
        "train_loss (highest)": 3.0,
        "epoch": 3.0,
        "step": 2.0,
    }
    acc = {"val_acc": 0.75, "val_acc (lowest)": 0.75, "val_acc (highest)": 0.75}
    assert runs[1].results == {**curve, **acc}
    assert [run.status for run in runs] == ["", ""]


def version(folder: Path, hparams: str = "", metrics: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hparams.yaml").write_text(hparams)
    (folder / "metrics.csv").write_text(metrics)
    return folder


def test_no_tag_of_yaml_is_obeyed(tmp_path: Path) -> None:
    text = yaml.dump(
        {"i": np.int64(3), "f": np.float32(0.5), "relu": nn.functional.relu, "attack": Attack(tmp_path / "x")}
    )
    text += "mine: !Mine {a: 1}\nother: !!python/object/new:os.system [x]\n"
    text += "odd: !!python/object/apply:numpy._core.multiarray.scalar [1, 2]\n"
    (run,) = lightning.read(str(version(tmp_path / "v", text)))
    expected = {
        "i": 3,
        "f": 0.5,
        "relu": "torch.nn.functional.relu",
        "mine.a": 1,
        "other": "x",
        "attack": str(tmp_path / "x"),
    }
    assert run.settings == expected
    assert not (tmp_path / "x").exists()


def test_columns_are_curves_and_a_row_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    (run,) = lightning.read(
        str(version(tmp_path / "v", "", "epoch,loss,step,text\r\n0,,1,a\r\n0,0.5,2,\r\n1,nan,3,\r\n1,0.2,4"))
    )
    loss = run.results.pop("loss")  # type: ignore[attr-defined]
    assert run == Run(
        f"{tmp_path}/v", {}, {"epoch": 2.0, "step": 3.0, "loss (lowest)": 0.5, "loss (highest)": 0.5}
    )
    assert math.isnan(loss)


def test_versions_that_are_damaged_are_refused(tmp_path: Path) -> None:
    assert "got no metrics.csv and no hparams.yaml" in refused(lightning.read, tmp_path)
    for text, words in {
        "a: 1\nb: [": ":2: expected settings in YAML: ",
        "- 1": ": expected settings in YAML: got list instead of names with values. Mend it, or move it away.",
        "? [1]\n: 2": ":1: expected settings in YAML: ",
        "a: 2024-99-99": ": expected settings in YAML: ",
        "\x00": ": expected settings in YAML: ",
    }.items():
        assert f"{version(tmp_path / 'v', text)}/hparams.yaml{words}" in refused(lightning.read, tmp_path), (
            text
        )
    version(tmp_path / "v", "", "a\n" + "x" * 200_000 + "\n")
    assert "metrics.csv: expected a CSV table: Error: field larger" in refused(lightning.read, tmp_path)


# ---------------------------------------------------------------- Ray Tune


def made_trial(folder: Path, name: str, lr: float, reports: str, **files: str) -> Path:
    trial = folder / name
    trial.mkdir(parents=True)
    (trial / "params.json").write_text(json.dumps({"lr": lr, "model": {"layers": [1, 2]}}))
    (trial / "result.json").write_text(reports)
    for file, text in files.items():
        (trial / file.replace("_", ".")).write_text(text)
    return trial


def report(step: int, loss: float, **more: Any) -> str:
    own = {
        "training_iteration": step,
        "time_total_s": 2.0 * step,
        "pid": 1,
        "hostname": "h",
        "done": False,
        "date": "d",
    }
    return (
        json.dumps(
            {"loss": loss, "eval": {"acc": step / 10}, "config": {"lr": 1}, "note": "x", **own, **more}
        )
        + "\n"
    )


ACC = {"eval.acc": 0.2, "eval.acc (lowest)": 0.1, "eval.acc (highest)": 0.2}
LOSS = {"loss": 2.0, "loss (lowest)": 1.0, "loss (highest)": 2.0}
TOTALS = {"training_iteration": 2, "time_total_s": 4.0}


def test_trials_of_tune_are_read_from_their_files(tmp_path: Path) -> None:
    both = report(1, 1.0) + report(2, 2.0)
    made_trial(tmp_path, "a", 0.1, both + '{"loss": 9, "tr')
    made_trial(tmp_path, "b", 0.2, report(1, 1.0), error_txt="Traceback", error_pkl="never read")
    made_trial(tmp_path, "c", 0.3, report(1, 1.0) + report(2, 2.0, done=True))
    made_trial(tmp_path, "d", 0.4, "", progress_csv="loss,eval/acc,pid,config/lr,done,training_iteration,time_total_s\n"
               "1.0,0.1,7,1,False,1,2.0\n2.0,0.2,7,1,False,2,4.0\n3.0,0.")  # fmt: skip
    made_trial(tmp_path, "e", 0.5, "")
    a, b, c, d, e = tune.read(str(tmp_path))
    assert a == Run(
        f"{tmp_path}/a", {"lr": 0.1, "model.layers.0": 1, "model.layers.1": 2}, {**TOTALS, **LOSS, **ACC}
    )
    assert [run.status for run in (a, b, c, d, e)] == ["", "failed", "finished", "", ""]
    assert c.results == a.results
    assert d.results == {**TOTALS, **LOSS, **{name.replace(".", "/"): value for name, value in ACC.items()}}
    assert e.results == {}


def test_the_status_of_a_trial_is_that_of_tunes_own_table(tmp_path: Path) -> None:
    stated = {"a": "TERMINATED", "b": "ERROR", "c": "RUNNING", "d": "PENDING"}
    for name in stated:
        made_trial(
            tmp_path,
            name,
            0.1,
            report(1, 1.0),
            **({"error_txt": "of an attempt before"} if name == "a" else {}),
        )
    old = {"trial_data": [[json.dumps({"relative_logdir": "a", "status": "RUNNING"}), "{}"]]}
    new = {
        "trial_data": [
            [json.dumps({"relative_logdir": name, "status": word}), "{}"] for name, word in stated.items()
        ]
    }
    (tmp_path / "experiment_state-2026-01-01_00-00-00.json").write_text(json.dumps(old))
    (tmp_path / "experiment_state-2026-01-02_00-00-00.json").write_text(json.dumps(new))
    assert [run.status for run in tune.read(str(tmp_path))] == ["finished", "failed", "running", ""]


def test_trials_that_are_damaged_are_refused(tmp_path: Path) -> None:
    assert "expected the folder of a Tune experiment, got none with a params.json" in refused(
        tune.read, tmp_path
    )
    trial = made_trial(tmp_path, "a", 0.1, report(1, 1.0) + '{"cut"\n' + report(2, 1.0))
    assert f"{trial}/result.json:2: expected JSON, got a damaged file: " in refused(tune.read, tmp_path)
    (trial / "result.json").write_text("7\n")
    assert f"{trial}/result.json:1: expected a JSON object, got int" in refused(tune.read, tmp_path)
    (trial / "params.json").write_text("{\n")
    assert f"{trial}/params.json:2: expected JSON, got a damaged file: " in refused(tune.read, tmp_path)
    (tmp_path / "experiment_state-x.json").write_text('{"trial_data": 5}')
    assert f"{tmp_path}: expected files of Tune's: " in refused(tune.read, tmp_path)


EXPERIMENT = """
import sys
import ray
from ray import tune

def train(config):
    for step in range(3):
        if config["lr"] > 0.5 and step == 1:
            raise ArithmeticError
        tune.report({"loss": config["lr"] + 1 / (1 + step), "eval": {"acc": step / 4}})

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
space = {"lr": tune.grid_search([0.25, 0.75]), "optimizer": {"name": "adam"}}
tune.Tuner(train, param_space=space, run_config=tune.RunConfig(name="mine", storage_path=sys.argv[1], verbose=0)).fit()
ray.shutdown()
"""


@pytest.mark.ray
@pytest.mark.long
def test_an_experiment_of_tune_is_read(tmp_path: Path) -> None:
    # A process of its own: Ray reads tokens once per process.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", EXPERIMENT, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    good, bad = sorted(tune.read(str(tmp_path)), key=lambda run: run.settings["lr"])
    assert [run.settings for run in (good, bad)] == [
        {"lr": lr, "optimizer.name": "adam"} for lr in (0.25, 0.75)
    ]
    assert (good.status, bad.status) == ("finished", "failed")
    assert isinstance(good.results["time_total_s"], float)
    assert {name: value for name, value in good.results.items() if name != "time_total_s"} == {
        "training_iteration": 3, "loss": 0.25 + 1 / 3, "loss (lowest)": 0.25 + 1 / 3, "loss (highest)": 1.25,
        "eval.acc": 0.5, "eval.acc (lowest)": 0.0, "eval.acc (highest)": 0.5,
    }  # fmt: skip
    assert bad.results["training_iteration"] == 1
