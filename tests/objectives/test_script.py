"""Scripts that nobody has edited: exact, or refused with the cause; and left as they are."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from bsearch.objectives.loop import newest_loop
from bsearch.objectives.profiling.loop_probes import examined_session
from bsearch.objectives.script.look import looked_at
from bsearch.objectives.script.metric import metric_pattern, value_of
from bsearch.objectives.script.script import run_script as run_script_as_seen
from bsearch.objectives.script.told import _ModulesChanged
from bsearch.objectives.task_code import sources_of, task_code_hash
from bsearch.search.preview.script import files_of, found_in, metric_in, script_of
from bsearch.spaces.errors import StudyFileError, TaskError
from bsearch.spaces.trial import Measurement, TrialSetup
from conftest import BSEARCH
from helpers import bsearch, finished, setup

SCRIPTS = Path(__file__).parents[1] / "scripts"
# The loaders of these scripts, as they make them by themselves.
SEEN = [
    ("RandomSampler of 200", 0, 0),
    ("RandomSampler of 120", 0, 0),
    ("SequentialSampler of 100", 100, 1),
    ("SequentialSampler of 100", 64, 2),
]
run_script = partial(run_script_as_seen, evaluation=SEEN)
OWN = {"schedule": "constant", "warmup": 0.0}


# What a script may do after each batch that parts would have too often.
EACH_PART = {
    "clamps": "[one.grad.clamp_(-0.1, 0.1) for one in model.parameters()]\n            optimizer.step()",
    "counts": "optimizer.step()\n            if index == 12: optimizer.param_groups[0]['lr'] *= 0.1",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, tmp_path)
    text = (SCRIPTS / "plain.py").read_text()
    both = text.replace("in enumerate(train):", "in enumerate(train):\n            next(iter(test))")
    (tmp_path / "two_loaders.py").write_text(both)
    breaks = "scheduler.step()\n        if epoch == 2:\n            break"
    (tmp_path / "patient.py").write_text(text.replace("scheduler.step()", breaks))
    for name, does in EACH_PART.items():
        (tmp_path / f"{name}.py").write_text(text.replace("optimizer.step()", does))
    (tmp_path / "twice.py").write_text(
        text.replace("scheduler.step()", "scheduler.step()\n        print('Accuracy: 1/4')")
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def own(
    folder: Path, batch: int = 20, accumulation: int = 1, epochs: int = 2, rate: float = 0.1, **changes: Any
) -> TrialSetup:
    budget = changes.pop("budget", 200 * epochs)
    made = setup(batch, accumulation, budget, rate, training=OWN, folder=str(folder), **changes)
    return replace(
        made, epochs=epochs, largest_micro_batch=-(-batch // accumulation) if accumulation > 1 else None
    )


plain = partial(
    run_script,
    script="plain.py",
    batch="--batch-size",
    rate="--lr",
    epochs="--epochs",
    seed="--seed",
    metric="Accuracy:",
)
constants = partial(
    run_script,
    script="constants.py",
    batch="BATCH_SIZE",
    rate="LR",
    epochs="EPOCHS",
    metric="val_loss=",
    loss="mean",
)
summed = partial(
    run_script, script="summed.py", batch="--batch-size", rate="--lr", epochs="--num-epochs", metric="top1"
)
named = partial(run_script, batch="--batch-size", rate="--lr", epochs="--epochs", metric="accuracy")
FUNCTIONS = {"plain": plain, "constants": constants, "summed": partial(summed, loss="sum")}
for name, function in FUNCTIONS.items():
    function.__name__ = name  # type: ignore[attr-defined]


def weights() -> list[torch.Tensor]:
    loop = newest_loop()
    assert loop is not None
    return [one.detach().clone() for one in loop.parameters]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_step_in_parts_is_the_step(folder: Path, name: str) -> None:
    made = replace(own(folder, 24), smallest_micro_batch=2)
    examination = examined_session(FUNCTIONS[name], made)
    assert (examination.verdict, examination.findings) == ("exact", ()), examination.lines
    assert examination.difference < 1e-11


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (partial(summed, loss="mean"), "mean", "write loss='sum'"),
        (partial(named, script="adversarial.py", metric="loss_G"), "mean", "write splits=False"),
    ],
)
def test_what_is_not_exact_is_refused_with_its_cause(
    folder: Path, function: Any, kind: str, words: str
) -> None:
    function.__name__ = "train"
    (finding,) = examined_session(function, replace(own(folder, 8), smallest_micro_batch=2)).refusals
    assert finding.kind == kind
    assert words in finding.message


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            partial(named, script="by_hand.py", batch="--batch_size", rate="--learning_rate"),
            "sets its rates itself",
        ),
        (partial(plain, script="clamps.py"), "changes gradients after each part"),
    ],
)
def test_what_is_done_after_each_batch_is_refused_before_the_first_trial(
    folder: Path, function: Any, words: str
) -> None:
    function.__name__ = "train"
    with pytest.raises(TaskError, match=words):
        examined_session(function, replace(own(folder, 8), smallest_micro_batch=2))


def test_what_it_does_late_ends_the_trial_that_is_split_and_no_other(folder: Path) -> None:
    counts = partial(plain, script="counts.py")
    assert len(list(counts(own(folder, 10)))) == 2
    with pytest.raises(TaskError, match="by counting batches, of which some come in parts"):
        list(counts(own(folder, 10, 2)))


def test_an_average_of_weights_comes_with_whole_batches(folder: Path) -> None:
    function = partial(named, script="averaged.py", batch="--batch")
    function.__name__ = "train"  # type: ignore[attr-defined]
    made = replace(own(folder, 8), smallest_micro_batch=2)
    with pytest.raises(TaskError, match=r"averaged.py: it moves model1.weight after each part.*splits=False"):
        examined_session(function, made)
    whole = partial(function, splits=False)
    whole.__name__ = "train"  # type: ignore[attr-defined]
    assert examined_session(whole, made).verdict == "unsplit"
    assert [round(one.accuracy or 0.0, 1) > 0.5 for one in whole(own(folder, 10, epochs=3, budget=360))] == [
        True
    ] * 3


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (partial(named, script="accumulates.py"), "expected an optimizer step after each batch"),
        (
            partial(named, script="no_loader.py", epochs="", steps="--max-iters"),
            "expected a training loop over a torch DataLoader",
        ),
        (partial(plain, rate="--gamma"), r"exit code 2"),
        (partial(plain, rate="--seed", seed=""), "exit code 2"),
        (
            partial(plain, batch="--test-batch-size"),
            "expected a training loader with the batch it is told, 20; got 16",
        ),
        (
            partial(constants, rate="CLIP"),
            "expected a script that gives its optimizer the rate it is told, 0.1; got 0.01",
        ),
        (partial(constants, rate="RATE"), "expected a number at RATE"),
        (partial(plain, epochs=""), r"ended after 800|expected to train on 1200 samples"),
        (partial(plain, script="patient.py"), "It stops by itself"),
        (partial(plain, script="nowhere.py"), "nowhere.py: no such script"),
        (partial(plain, script="two_loaders.py"), "expected one loader that it trains on"),
        (
            partial(plain, script="twice.py"),
            "expected one number after 'Accuracy:' once a pass, got .*, 0.25",
        ),
        (partial(plain, metric="(Accuracy"), "expected a regular expression"),
    ],
)
def test_what_a_trial_cannot_carry_is_refused_in_words(folder: Path, function: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        list(function(own(folder, epochs=6)))


def test_a_whole_batch_trains_as_the_script_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one step an epoch the order of samples does not matter; the rest is the script's own."""
    text = (folder / "plain.py").read_text().replace("nn.Dropout(0.1)", "nn.Identity()")
    (folder / "plain.py").write_text(text)
    (measured, *_, last) = plain(own(folder, 200, epochs=4, rate=0.5))
    ours = weights()
    monkeypatch.setattr(
        sys, "argv", ["plain.py", "--batch-size", "200", "--epochs", "4", "--lr", "0.5", "--seed", "0"]
    )
    theirs = by_itself("plain.py", torch.optim.Adadelta, monkeypatch)
    assert (folder / "model.pt").exists()  # by itself it writes beside itself
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert (measured.samples_seen, last.samples_seen) == (200, 800)


def test_files_of_a_trial_stay_out_of_the_users_folder_and_torch_is_as_before(folder: Path) -> None:
    before = {path.name for path in folder.iterdir()}
    was = (
        torch.Tensor.backward,
        torch.utils.data.DataLoader.__iter__,
        sys.stdout,
        sys.argv,
        sys.modules["__main__"],
        Path.cwd(),
    )
    assert len(list(plain(own(folder)))) == 2
    assert {path.name for path in folder.iterdir()} == before
    now = (
        torch.Tensor.backward,
        torch.utils.data.DataLoader.__iter__,
        sys.stdout,
        sys.argv,
        sys.modules["__main__"],
        Path.cwd(),
    )
    assert now == was


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_that_is_stopped_goes_on_to_the_same_end(folder: Path, tmp_path: Path, name: str) -> None:
    function = FUNCTIONS[name]
    made = own(
        folder, 20, 2, epochs=3, rate=0.01, budget={"plain": 600, "constants": 600, "summed": 360}[name]
    )

    def trained(setup: TrialSetup, most: int = 9) -> list[Measurement]:
        torch.manual_seed(5)
        measurements: Iterator[Measurement] = function(setup)
        return list(islice(measurements, most))

    whole = trained(made)
    ends = weights()
    kept = replace(made, checkpoint=f"file://{tmp_path}/kept/checkpoint.pt", checkpoint_every_s=0.0)
    first = trained(kept, most=1)
    again = trained(kept)
    assert [one.scores for one in (*first, *again)] == [one.scores for one in whole]
    assert again[-1].facts["resumed_at"] == first[0].samples_seen
    main = json.loads(str(again[-1].facts["optimizer_groups"]))[0]  # as the script's own optimizer stepped
    assert main["lr"] == pytest.approx(0.01) and "weight_decay" in main
    for one, other in zip(weights(), ends, strict=True):
        assert torch.equal(one, other)


def test_files_of_the_user_are_neither_removed_nor_seen_to_change(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "precious.pt").write_text("mine")
    text = (SCRIPTS / "plain.py").read_text()
    saves = """
        import os
        os.makedirs("ckpt", exist_ok=True)
        torch.save(obj=model.state_dict(), f="ckpt/x.tmp")
        os.replace("ckpt/x.tmp", "ckpt/x.pt")
        assert os.path.exists("ckpt/x.pt") and os.listdir("ckpt") == ["x.pt"]
        with open("ckpt/log.txt", "a") as log: log.write("one")
        os.remove("ckpt/log.txt")
        import threading
        def write():
            os.makedirs("runs", exist_ok=True)
            with open(b"runs/events", "ab") as file: file.write(b"x")
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        assert os.listdir("runs") == ["events"]
"""
    (folder / "saves.py").write_text(text.replace("scheduler.step()\n", f"scheduler.step(){saves}", 1))
    assert len(list(partial(plain, script="saves.py")(own(folder)))) == 2
    assert not (folder / "ckpt").exists()
    assert not (folder / "runs").exists()
    (folder / "removes.py").write_text(
        text.replace("def main():", "import shutil\nshutil.rmtree('out')\n\ndef main():")
    )
    with pytest.raises(PermissionError, match="neither changes nor removes"):
        list(partial(plain, script="removes.py")(own(folder)))
    assert (folder / "out" / "precious.pt").read_text() == "mine"


def test_numbers_after_a_text() -> None:
    pattern = metric_pattern("Accuracy:")
    for text, value in {
        "Accuracy: 9/10 (90%)": 0.9,
        "Accuracy:  12.5 %": 0.125,
        "x Accuracy: -3e-1": -0.3,
    }.items():
        found = pattern.search(text)
        assert found is not None
        assert value_of(found) == pytest.approx(value)
    assert pattern.search("Accuracy: unknown, 3 left over from before") is None
    assert metric_in(["Train loss 0.4", "val acc 91.2% (best 93%)", "val loss 0.2"]) == (
        "val acc",
        "val_acc",
        "maximize",
    )
    assert metric_in(["nothing here"]) is None


def in_tiers(names: Any, *quick: str) -> list[Any]:
    """Parameters, of which these are tried in the quick tier."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


# How other scripts are told their numbers, and say their metric: what differs from quickstart.py, and what is found.
TELL = {
    "in its text": (
        [],
        {"batch": "batch_size=16", "rate": "lr=0.1", "epochs": "t in range(5)"},
        "Test Accuracy:",
    ),
    "in a file": (
        [
            ("import torch\n", "import torch, yaml\nsettings = yaml.safe_load(open('conf/a.yaml'))\n"),
            ("batch_size=16", "batch_size=settings['batch']"),
            ("lr=1e-1", "lr=settings['optim']['lr']"),
            ("range(5)", "range(settings['epochs'])"),
        ],
        {"batch": "conf/a.yaml:batch", "rate": "conf/a.yaml:optim.lr", "epochs": "conf/a.yaml:epochs"},
        "Test Accuracy:",
    ),
    "in a module": (
        [
            ("import torch\n", "import torch, settings\n"),
            ("batch_size=16", "batch_size=settings.BATCH"),
            ("lr=1e-1", "**settings.OPTIM"),
            ("range(5)", "range(settings.Train.epochs)"),
        ],
        {
            "batch": "settings.py:BATCH",
            "rate": "settings.py:'lr': 0.1",
            "epochs": "settings.py:Train.epochs=5",
        },
        "Test Accuracy:",
    ),
    "by click": (
        [
            ("optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)\n", ""),
            (
                "for t in range(5):",
                "import click\n@click.command()\n@click.option('--lr', default=0.1)\ndef main(lr):\n  global optimizer\n"
                "  optimizer = torch.optim.SGD(model.parameters(), lr=lr)\n  for t in range(5):",
            ),
            ("    evaluate(test_loader)", "    evaluate(test_loader)\n\nmain()"),
        ],
        {"batch": "batch_size=16", "rate": "--lr", "epochs": "t in range(5)"},
        "Test Accuracy:",
    ),
    "to W&B": (
        [
            ("import torch\n", "import torch, wandb\nwandb.init(config={'a': 1}).watch(wandb.config.a)\n"),
            ('print(f"Test', "wandb.log({'val/acc': correct, 'x': wandb.Image(1)}); str(f\"Test"),
        ],
        {"batch": "batch_size=16"},
        "val/acc:",
    ),
    "to TensorBoard": (
        [
            (
                "import torch\n",
                "import torch\nfrom torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter('runs')\n",
            ),
            ('print(f"Test', "writer.add_scalar('acc/val', torch.tensor(correct), t); str(f\"Test"),
        ],
        {"batch": "batch_size=16"},
        "acc/val:",
    ),
    "to a CSV file": (
        [
            (
                "import torch\n",
                "import torch, csv\nlog = open('log.csv', 'w')\nprint('epoch,val_acc', file=log)\n",
            ),
            ('print(f"Test', "print(f'{t},{correct}', file=log); str(f\"Test"),
        ],
        {"batch": "batch_size=16"},
        "val_acc:",
    ),
    "to a JSON file": (
        [
            ("import torch\n", "import torch, json\nhistory = {'val_acc': []}\n"),
            (
                'print(f"Test',
                "history['val_acc'].append(correct); json.dump(history, open('log.json', 'w')); str(f\"Test",
            ),
        ],
        {"batch": "batch_size=16"},
        "val_acc:",
    ),
    "by its logger": (
        [
            ("import torch\n", "import torch, logging\nlogging.basicConfig(level='INFO')\n"),
            ('print(f"Test', 'logging.info(f"Test'),
        ],
        {"batch": "batch_size=16"},
        "Test Accuracy:",
    ),
    "to bsearch": (
        [
            ("import torch\n", "import torch, bsearch\n"),
            ('print(f"Test', 'bsearch.report(val_acc=correct); str(f"Test'),
        ],
        {},
        "val_acc:",
    ),
    "by Accelerate": (
        [
            (
                "import torch\n",
                "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n",
            ),
            (
                "\n\n\ndef train(",
                "\nmodel, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)\n\n\ndef train(",
            ),
            ("loss.backward()", "accelerator.backward(loss)"),
        ],
        {"batch": "batch_size=16", "rate": "lr=0.1"},
        "Test Accuracy:",
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that they leave open
@pytest.mark.parametrize(
    "how", in_tiers(TELL, "in its text", "in a file", "in a module", "to W&B", "to a CSV file")
)
def test_other_ways_to_be_told_and_to_say_the_metric_are_the_same_training(folder: Path, how: str) -> None:
    changes, told, metric = TELL[how]
    text = (SCRIPTS / "quickstart.py").read_text()
    for one, other in changes:
        assert one in text
        text = text.replace(one, other)
    (folder / "changed.py").write_text(text)
    (folder / "settings.py").write_text(
        "BATCH = 16\nOPTIM = {'lr': 1e-1}\nclass Train: pass\nTrain.epochs = 5\n"
    )
    (folder / "conf").mkdir()
    (folder / "conf" / "a.yaml").write_text("batch: 16\noptim: {lr: 0.1}\nepochs: 5\n")
    found = found_in("changed.py", [], asdict(looked_at("changed.py", [])))
    assert told.items() <= found.told.items()
    assert found.metric[0] == metric
    assert not found.counts
    before = {path.name for path in folder.iterdir()} - {"__pycache__"}
    measured = list(run_script(own(folder, 20, 2, epochs=3), "changed.py", metric=metric, **found.told))
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before
    plainly = run_script(
        own(folder, 20, 2, epochs=3),
        "quickstart.py",
        metric="Accuracy:",
        batch="batch_size=16",
        rate="lr=1e-1",
        epochs="t in range(5)",
        seed="torch.manual_seed(3)",
    )
    expected = [one.accuracy for one in plainly]
    assert [one.accuracy for one in measured] == pytest.approx(expected, abs=1e-6), how
    assert ("batch_size=16 set to 20" in str(measured[-1].facts["command"])) == (
        found.told["batch"] == "batch_size=16"
    )
    assert len(set(expected)) > 1


# What must not be taken for the metric, or for the number of epochs: what differs from quickstart.py, and how it ends.
NOT_TAKEN: dict[str, tuple[list[tuple[str, str]], dict[str, str], Any]] = {
    "a record's number of before the training": (
        [
            (
                "import torch\n",
                "import json\nimport torch\njson.dump({'acc': 0.95}, open('config.json', 'w'))\nhistory = []\n",
            ),
            (
                'print(f"Test',
                "history.append({'acc': correct}); json.dump(history, open('h.json', 'w')); str(f\"Test",
            ),
        ],
        {"metric": "acc:"},
        [0.47, 0.58],
    ),
    "a record's rows of within the pass": (
        [
            ("import torch\n", "import torch\nlog = open('log.csv', 'w')\nprint('step,acc', file=log)\n"),
            ("        loss.backward()", "        print(f'{batch},0.1', file=log)\n        loss.backward()"),
            ('print(f"Test', "print(f'{t},{correct}', file=log); str(f\"Test"),
        ],
        {"metric": "acc:"},
        [0.47, 0.58],
    ),
    "what a history has from an earlier pass": (
        [
            ("import torch\n", "import json\nimport torch\nhistory = {'acc': [], 'x': []}\n"),
            (
                'print(f"Test',
                "history['acc'] += [correct] * (t == 1); history['x'] += [t]; "
                "json.dump(history, open('h.json', 'w')); str(f\"Test",
            ),
        ],
        {"metric": "acc:"},
        [0.58],
    ),
    "another split's row": (
        [
            (
                "import torch\n",
                "import torch\nlog = open('log.csv', 'w')\nprint('epoch,split,acc', file=log)\n",
            ),
            ('print(f"Test', "print(f'{t},val,{correct}\\n{t},train,0.123', file=log); str(f\"Test"),
        ],
        {"metric": "val/acc:"},
        [0.47, 0.58],
    ),
    "a progress bar's line of the pass": (
        [
            (
                "in enumerate(dataloader):",
                "in enumerate(bar := tqdm(dataloader)):\n        bar.set_postfix(Accuracy=0.99)",
            ),
            ("import torch\n", "import torch\nfrom tqdm import tqdm\n"),
        ],
        {"metric": "Accuracy[:=]"},
        [0.47, 0.58],
    ),
    "an evaluation after a pass that was left by break": (
        [
            (
                "        optimizer.zero_grad()\n",
                "        optimizer.zero_grad()\n        if (batch + 1) * len(inputs) >= 200: break\n",
            )
        ],
        {},
        [0.47, 0.58],
    ),
    "what follows a progress bar's line": (
        [
            (
                "import torch\n",
                "import sys\nimport torch\nfrom tqdm import tqdm\nbar = tqdm(total=999, mininterval=0)\n",
            ),
            ("        optimizer.step()\n", "        optimizer.step()\n        bar.update(1)\n"),
            (
                'print(f"Test Accuracy: {100 * correct:>0.1f}%")',
                'print(f"Test Accuracy: {correct}", file=sys.stderr)',
            ),
        ],
        {},
        [0.47, 0.58],
    ),
    "a W&B run that was resumed": (
        [
            ("import torch\n", "import torch, wandb\nassert wandb.run is None\nrun = wandb.init()\n"),
            ("loss.backward()", "((0.01 if run.resumed or wandb.run.disabled else 1.0) * loss).backward()"),
        ],
        {},
        [0.47, 0.58],
    ),
    "a number of the training data, on a line like that of the test data": (
        [
            ("    evaluate(test_loader)", "    print('Test Accuracy: 1.0')\n    evaluate(test_loader)"),
        ],
        {},
        [0.47, 0.58],
    ),
    "a batch of the rest, where the loader drops it": (
        [
            ("batch_size=16,", "batch_size=16, drop_last=True,"),
            (
                "        loss = loss_fn(",
                "        assert len(inputs) == 15, len(inputs)\n        loss = loss_fn(",
            ),
        ],
        {"batch": "batch_size=16", "setup": {"batch": 30, "accumulation": 2}},
        [0.46, 0.5],
    ),
    "a measurement that is not made after the end": (
        [("    evaluate(test_loader)", "    if t == 0: evaluate(test_loader)")],
        {},
        "expected a number after 'Test Accuracy:' once its training has ended",
    ),
    "a number of a pass without an evaluation": (
        [("    evaluate(test_loader)", "    print('Test Accuracy: 1.0')\n    if t: evaluate(test_loader)")],
        {"evaluates": True},
        [0.58],
    ),
    "a rest of what steps= names": (
        [
            ("batch_size=16,", "batch_size=16, drop_last=True,"),
            (
                "for t in range(5):\n",
                "taken = []\nSTEPS = 10\nfor t in range(99):\n    if len(taken) >= STEPS: break\n",
            ),
            (
                "        optimizer.zero_grad()\n",
                "        optimizer.zero_grad()\n        taken += [1]\n        if len(taken) >= STEPS: break\n",
            ),
            ("def train(dataloader):\n", "def train(dataloader):\n    global taken\n"),
            (
                "        loss = loss_fn(",
                "        assert len(inputs) == 30, len(inputs)\n        loss = loss_fn(",
            ),
        ],
        {"epochs": "", "steps": "STEPS", "setup": {"batch": 30, "accumulation": 1}},
        "",
    ),
    "a batch of more than the data": (
        [],
        {"setup": {"batch": 300}},
        "expected a batch of at most the 200 samples",
    ),
    "a process group": (
        [("import torch\n", "import torch\ntorch.distributed.init_process_group('gloo')\n")],
        {},
        "expected a script of one process, got one that joins others",
    ),
    "a process's own settings": (
        [
            (
                "import torch\n",
                "import multiprocessing, signal\nimport torch\nmultiprocessing.set_start_method('spawn')\n"
                "torch.set_num_interop_threads(1)\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n",
            )
        ],
        {},
        [0.47, 0.58],
    ),
    "a batch fetched ahead": (
        [
            (
                "enumerate(dataloader):",
                "enumerate(ahead(dataloader)):",
            ),
            (
                "def train(",
                "def ahead(loader):\n    before = None\n    for one in loader:\n        if before: yield before\n"
                "        before = one\n    yield before\n\ndef train(",
            ),
        ],
        {},
        "expected a backward pass over each batch before it takes the next, got none",
    ),
    "a number that does not set the epochs": (
        [("import torch\n", "import torch\nDECAY = 5\n")],
        {"epochs": "DECAY"},
        "expected DECAY to set the number of epochs; it was set to 2, but the script started another epoch",
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that they leave open
@pytest.mark.parametrize("name", in_tiers(NOT_TAKEN, *[*NOT_TAKEN][:4], [*NOT_TAKEN][-1]))
def test_what_must_not_be_taken_is_not(folder: Path, name: str) -> None:
    changes, told, expected = NOT_TAKEN[name]
    text = (SCRIPTS / "quickstart.py").read_text()
    for one, other in changes:
        assert one in text
        text = text.replace(one, other)
    (folder / "changed.py").write_text(text)
    told = {
        "batch": "batch_size=16",
        "rate": "lr=0.1",
        "epochs": "t in range(5)",
        "metric": "Test Accuracy:",
    } | told
    size: Any = {"batch": 20, "accumulation": 2} | told.pop("setup", {})  # type: ignore[arg-type, call-overload]
    trained = run_script(own(folder, **size, epochs=2), "changed.py", **told)
    if not expected:
        *_, last = trained
        assert last.samples_seen % size["batch"] == 0
    elif isinstance(expected, str):
        with pytest.raises(TaskError, match=expected):
            list(trained)
    else:
        assert [one.accuracy for one in trained] == pytest.approx(expected)


def by_itself(name: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights that a script trains by itself, with one optimizer of this kind."""
    kept: list[torch.Tensor] = []
    begin = kind.__init__

    def noted(self: Any, given: Any, **more: Any) -> None:
        kept.extend(given := [*given])
        begin(self, given, **more)

    monkeypatch.setattr(kind, "__init__", noted)
    runpy.run_path(name, run_name="__main__")
    return [one.detach() for one in kept]


@pytest.mark.parametrize("splits", [True, False])
def test_data_that_are_not_shuffled_come_in_their_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch, splits: bool
) -> None:
    text = (SCRIPTS / "quickstart.py").read_text().replace("shuffle=True", "").replace("range(5)", "range(2)")
    (folder / "in_order.py").write_text(text.replace("batch_size=16", "batch_size=20"))
    told = {"batch": "batch_size=20", "rate": "lr=0.1", "epochs": "t in range(2)", "metric": "Accuracy:"}
    list(run_script(own(folder, 20, 2 if splits else 1, epochs=2), "in_order.py", splits=splits, **told))
    ours = weights()
    for one, other in zip(ours, by_itself("in_order.py", torch.optim.SGD, monkeypatch), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_one_that_is_run_as_a_module(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "sizes.py").write_text("batch = 16\n")
    loop = """
def trained(model, step, loader):
    model.train()
    for index, (inputs, targets) in enumerate(loader):
        step(inputs, targets)
        loss(model(inputs), targets).backward()
        if index % 3 == 0: model.zero_grad()
"""
    (folder / "package" / "loops.py").write_text(loop)
    text = (SCRIPTS / "quickstart.py").read_text().replace("batch_size=16", "batch_size=sizes.batch")
    (folder / "package" / "train.py").write_text(
        text.replace("import torch\n", "import torch\nfrom . import loops, sizes\n", 1)
    )
    found = found_in("-m package.train", [], asdict(looked_at("-m package.train", [])))
    assert found.told == {
        "batch": "package/sizes.py:batch",
        "rate": "lr=0.1",
        "epochs": "t in range(5)",
        "seed": "torch.manual_seed(3)",
    }
    assert found.counts == ("package/loops.py:7",)
    measured = list(
        run_script(own(folder, 20, 2, epochs=2), "-m package.train", metric="Accuracy:", **found.told)
    )
    assert [one.accuracy for one in measured] == pytest.approx([0.67, 0.78])
    assert str(measured[-1].facts["command"]).startswith(
        "python -m package.train  # with package/sizes.py:batch set to 20"
    )
    (folder / "tasks.py").write_text(
        "def train(setup):\n    yield from run_script(setup, '-m package.train', '')\n"
    )
    own_files = {path.name for path in sources_of(f"{folder}/tasks.py:train")}
    assert own_files >= {"tasks.py", "train.py", "sizes.py"}


def test_the_loop_that_trains_is_found_and_no_other_number_changes(folder: Path) -> None:
    text = (SCRIPTS / "quickstart.py").read_text()
    deep = """layers = [nn.Linear(4, 8)]
for t in range(5): layers += [nn.ReLU(), nn.Linear(8, 8)]
model = nn.Sequential(*layers, nn.Linear(8, 2))"""
    text = text.replace("model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))", deep).replace(
        "batch_size=64", "batch_size=16"
    )
    (folder / "deep.py").write_text(text)
    found = found_in("deep.py", [], asdict(looked_at("deep.py", [])))
    assert (
        found.told == {"batch": "batch_size=16", "rate": "lr=0.1", "epochs": "t in range(5) #2"} | found.told
    )
    assert "seed: 3}" in files_of(found)["study.yaml"]
    list(
        run_script(
            own(folder, 20, epochs=2), "deep.py", metric="Accuracy:", **found.told, evaluation=found.loaders
        )
    )
    assert sum(one.numel() for one in weights()) == 40 + 5 * 72 + 18


def test_what_a_script_leaves_in_the_process_is_gone(folder: Path) -> None:
    (folder / "utils").mkdir()
    (folder / "utils" / "state.py").write_text("n = 0\n")
    lines = """
import logging, torch
from utils import state
state.n += 1
log = logging.getLogger("of a script")
if not log.handlers:
    log.addHandler(logging.FileHandler("out.csv"))
    log.setLevel("INFO")
    log.info("epoch,acc")
logging.disable(logging.DEBUG)
"""
    text = (SCRIPTS / "quickstart.py").read_text().replace("import torch\n", lines, 1)
    text = text.replace('print(f"Test', 'log.info(f"{t},{correct}"); print(state.n); str(f"Test')
    (folder / "leaves.py").write_text(text)
    told = {"batch": "batch_size=16", "rate": "lr=0.1", "epochs": "t in range(5)", "metric": "acc:"}
    for _ in range(2):
        assert [
            one.accuracy for one in run_script(own(folder, 20, epochs=2), "leaves.py", **told)
        ] == pytest.approx([0.45, 0.58], abs=0.1)
        assert "utils" not in sys.modules and "utils.state" not in sys.modules
        assert not logging.getLogger("of a script").handlers and not logging.root.manager.disable


def test_files_are_taken_over_whole(folder: Path) -> None:
    (folder / "mine.txt").write_text("before\n")
    does = """
    import shutil, tempfile
    from pathlib import Path
    Path("log.txt").write_text("top")
    os.makedirs("old")
    Path("old/log.txt").write_text("inner")
    shutil.rmtree("old")
    assert Path("log.txt").read_text() == "top" and not os.path.exists("old")
    os.makedirs("ckpt")
    Path("ckpt/a.pt").write_text("a")
    shutil.copy("ckpt/a.pt", "ckpt/best.pt")
    assert os.access("ckpt/best.pt", os.R_OK) and os.path.lexists("ckpt/best.pt")
    Path("done").touch()
    with open("mine.txt", "a") as more: more.write("after")
"""
    saves = """
        save_file({"w": torch.ones(2)}, "ckpt/model.safetensors")
        if epoch == 1: os.symlink("a.pt", "ckpt/latest")
        assert sorted(os.listdir("ckpt")) == ["a.pt", "best.pt", "latest", "model.safetensors"]
"""
    text = (SCRIPTS / "plain.py").read_text().replace("def main():\n", f"def main():\n    import os{does}")
    text = text.replace("scheduler.step()\n", f"scheduler.step(){saves}").replace(
        "import torch\n", "import torch\nfrom safetensors.torch import save_file\n", 1
    )
    (folder / "files.py").write_text(text)
    before = {path.name for path in folder.iterdir()}
    assert len(list(partial(plain, script="files.py")(own(folder)))) == 2
    assert {path.name for path in folder.iterdir()} == before
    assert (folder / "mine.txt").read_text() == "before\n"


def test_a_sum_is_told_from_a_mean(folder: Path) -> None:
    assert [looked_at(f"{name}.py", []).sums for name in ("plain", "summed")] == [False, True]


def test_a_folder_that_a_script_writes_into_keeps_its_files(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "image.png").write_text("mine")
    looks = """
    import os, glob
    with open("data/cache", "w") as cache: cache.write("x")
    assert sorted(os.listdir("data")) == sorted(entry.name for entry in os.scandir("data")) == ["cache", "image.png"]
    assert len(glob.glob("data/*")) == 2 and len(list(os.walk("data"))[0][2]) == 2
    assert "plain.py" in os.listdir()
"""
    (folder / "lists.py").write_text(
        (SCRIPTS / "plain.py").read_text().replace("def main():\n", f"def main():\n{looks}")
    )
    assert len(list(partial(plain, script="lists.py")(own(folder)))) == 2
    assert os.listdir(folder / "data") == ["image.png"]


# Ways to write over, move or delete a file `f` of the user's; of those that nothing can keep apart, which are refused.
WAYS = {
    "open w": "open(f, 'w').write('x')",
    "open a": "open(f, 'a').write('x')",
    "open r+": "open(f, 'r+').write('x')",
    "write_text": "Path(f).write_text('x')",
    "touch": "Path(f).touch()",
    "os.open": "os.write(os.open(f, os.O_WRONLY | os.O_TRUNC), b'x')",
    "dir_fd": "os.write(os.open(os.path.basename(f), os.O_WRONLY | os.O_TRUNC, dir_fd=os.open('out', os.O_RDONLY)), b'x')",
    "os.replace": "Path('made').write_text('x'); os.replace('made', f)",
    "shutil.copy": "Path('made').write_text('x'); shutil.copy('made', f)",
    "through a link": "open(f.replace('out', 'link'), 'w').write('x'); assert open(f).read() == 'x'",
    "of a link elsewhere": "open(f.replace('out', 'elsewhere'), 'w').write('x')",
    "link to the file": "open(f + '.link', 'w').write('x')",
    "link from elsewhere": "open(outside + '/' + os.path.basename(f), 'w').write('x')",
    "$PWD": "open(os.path.join(os.environ['PWD'], f), 'w').write('x')",
    "torch.save": "torch.save(torch.ones(1), os.path.join(os.environ['PWD'], f))",
    "torch.jit.save": "torch.jit.save(scripted, f); torch.jit.load(f)",
    "scripted.save": "scripted.save(f)",
    "gzip": "gzip.open(f, 'w').write(b'x')",
    "bz2": "bz2.open(f, 'w').write(b'x')",
    "lzma": "lzma.open(f, 'w').write(b'x')",
    "tarfile": "tarfile.open(f, 'w').add('plain.py')",
    "tarfile gz": "tarfile.open(f, 'w:gz').add('plain.py')",
    "zipfile": "zipfile.ZipFile(f, 'w').writestr('x', 'x')",
    "np.save": "np.save(open(f, 'wb'), np.ones(1)); np.savez(open(f, 'wb'), np.ones(1))",
    "tofile": "np.ones(1).tofile(f)",
    "memmap": "np.memmap(f, mode='r+')[:] = 7",
    "json": "json.dump([], open(f, 'w'))",
    "pickle": "pickle.dump([], open(f, 'wb'))",
    "csv": "csv.writer(open(f, 'w')).writerow([1])",
    "rmtree of all": "shutil.rmtree('out', ignore_errors=True)",
}
REFUSED = {
    "FileIO": "io.FileIO(f, 'w').write(b'x')",
    "posix.open": "posix.open(f, os.O_WRONLY | os.O_TRUNC)",
    "posix.remove": "posix.remove(f)",
    "posix.rename": "posix.rename(f, 'elsewhere/gone')",
    "remove": "os.remove(f)",
    "remove dir_fd": "os.remove(os.path.basename(f), dir_fd=os.open('out', os.O_RDONLY))",
    "rename": "os.rename(f, 'gone')",
    "move": "shutil.move(f, 'gone')",
    "rmtree": "shutil.rmtree('out')",
    "rmtree of a link's": "shutil.rmtree(os.environ['PWD'] + '/out')",
    "truncate": "os.truncate(f, 0)",
    "link": "os.link(f, outside + '/hard')",
    "symlink": "os.symlink(os.path.abspath(f), 'soft'); open('soft', 'w').write('x')",
    "sqlite": "sqlite3.connect(f).execute('create table x (y)')",
    "cp": "subprocess.run(['cp', 'plain.py', f])",
    "cp in a shell": "subprocess.run(f'cp plain.py {f}', **{'shell': True})",
    "system": "getattr(os, 'system')(f'echo x>{f}')",
    "rm -r": "subprocess.run(['rm', '-r', 'out'])",
    "dd": "subprocess.run(['dd', 'if=/dev/null', f'of={f}'])",
}


def test_however_a_script_writes_files_of_the_user_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way has a file of its own, in a run with one batch, as by `init`, and in a trial."""
    modules = (
        "bz2, csv, gzip, io, json, lzma, numpy, os, pickle, posix, shutil, sqlite3, subprocess, "
        "tarfile, warnings, zipfile"
    )
    ways = {name: (f"out/{number}.pt", code) for number, (name, code) in enumerate((WAYS | REFUSED).items())}
    project, outside = folder / "project", folder / "outside"
    for path in (project / "out", outside):
        path.mkdir(parents=True)
    (project / "link").symlink_to("out")
    (project / "elsewhere").symlink_to(outside)
    for name, (file, _) in ways.items():
        (project / file).write_text("mine")
        (project / f"{file}.link").symlink_to(project / file)
        at = outside / Path(file).name
        at.symlink_to(project / file) if name == "link from elsewhere" else at.write_text("mine")
    (folder / "as").symlink_to(project)
    text = (folder / "plain.py").read_text()

    def tried(name: str, way: tuple[str, str]) -> str:
        lines = (f"f = {way[0]!r}", "try:", f"    {way[1]}", "except PermissionError as error:")
        also = ("    assert 'neither changes nor removes' in str(error)", f"    refused.append({name!r})")
        return "".join(f"    {line}\n" for line in (*lines, *also))

    does = f"""
    from pathlib import Path
    import {modules}
    np, outside, refused = numpy, {str(outside)!r}, []
    warnings.simplefilter("ignore")
    scripted = torch.jit.script(nn.Linear(1, 1))
{"".join(map(tried, ways, ways.values()))}
    Path("refused.json").write_text(json.dumps(refused))
    Path(os.environ["TOLD"]).write_text(json.dumps(refused))
"""
    (project / "plain.py").write_text(text.replace("def main():\n", f"def main():{does}"))
    monkeypatch.chdir(folder / "as")
    monkeypatch.setenv("PWD", str(folder / "as"))
    monkeypatch.setenv("TOLD", str(folder / "told.json"))

    def held() -> dict[Path, bytes]:
        return {
            path: path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.name != "told.json"
        }

    before = held()
    for run in (lambda: looked_at("plain.py", []), lambda: list(plain(own(project, epochs=1)))):
        seen = run()
        assert not getattr(seen, "error", ""), seen
        assert json.loads((folder / "told.json").read_text()) == [*REFUSED]
        after = held()
        assert [
            name for name, (file, _) in ways.items() if after.get(project / file) != before[project / file]
        ] == []
        assert after == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_what_is_traced_or_exported_is_kept_apart(folder: Path) -> None:
    does = """def main():
    torch.jit.trace(nn.Linear(1, 1), torch.ones(1)).save("out.pt")
    torch.jit.load("out.pt")
    torch.export.save(torch.export.export(nn.Linear(1, 1), (torch.ones(1, 1),)), "out.pt2")
    torch.export.load("out.pt2")
"""
    for name in ("out.pt", "out.pt2"):
        (folder / name).write_text("mine")
    (folder / "exports.py").write_text((SCRIPTS / "plain.py").read_text().replace("def main():\n", does))
    assert len(list(partial(plain, script="exports.py")(own(folder, epochs=1)))) == 1
    assert [(folder / name).read_text() for name in ("out.pt", "out.pt2")] == ["mine"] * 2


def test_weights_of_safetensors_are_those_of_the_trial(folder: Path) -> None:
    """Whenever it is imported, and read as it was written."""
    does = """scheduler.step()
        from safetensors.torch import load_file, save_file
        save_file({"w": torch.full((1,), float(epoch))}, "best.safetensors")
        assert load_file("best.safetensors")["w"].item() == epoch
"""
    (folder / "best.safetensors").write_text("mine")
    (folder / "late.py").write_text((SCRIPTS / "plain.py").read_text().replace("scheduler.step()\n", does))
    for name in [name for name in sys.modules if name.startswith("safetensors.")]:
        sys.modules.pop(name)
    assert len(list(partial(plain, script="late.py")(own(folder)))) == 2
    assert (folder / "best.safetensors").read_text() == "mine"


def test_a_program_that_is_given_no_file_of_the_user_runs(folder: Path) -> None:
    (folder / ".venv").mkdir()
    does = """
    import subprocess, sqlite3, sys
    assert subprocess.run([sys.executable, "-c", "print('x y')"], capture_output=True, check=True, cwd=".").stdout == b"x y\\n"
    sqlite3.connect(":memory:").execute("create table x (y)")
"""
    (folder / "calls.py").write_text(
        (SCRIPTS / "plain.py").read_text().replace("def main():\n", f"def main():{does}")
    )
    assert len(list(partial(plain, script="calls.py")(own(folder, epochs=1)))) == 1


# What somebody's line is: the name and the direction of its metric, of the data that were held out where it says so.
LINES = {
    ("val_mape: 3.2",): ("val_mape", "minimize"),
    ("top1_err: 25.3",): ("top1_err", "minimize"),
    ("Top 1 error: 25.3",): ("top_1_error", "minimize"),
    ("val f1_loss: 0.3",): ("val_f1_loss", "minimize"),
    ("Accumulated loss: 12.0",): ("accumulated_loss", "minimize"),
    ("test WER: 12.0",): ("test_wer", "minimize"),
    ("Train acc 0.9 | val loss 0.4",): ("val_loss", "minimize"),
    ("Epoch: 0001 loss_train: 1.9 acc_train: 0.3 loss_val: 1.8",): ("loss_val", "minimize"),
    ("val_loss=0.4 (score_threshold 0.5)",): ("val_loss", "minimize"),
    ("val acc 0.85", "best_val_acc: 0.9"): ("val_acc", "maximize"),
    ("val acc 0.85", "Best val acc: 0.9"): ("val_acc", "maximize"),
    ("mapping 4 map size: 30", "val loss 0.2"): ("val_loss", "minimize"),
    ("val accuracy: 0.7 max val accuracy: 0.8",): ("val_accuracy", "maximize"),
    ("Peak val acc: 0.7", "val acc: 0.6"): ("val_acc", "maximize"),
    ("Acc: 0.4 BestAcc: 0.5",): ("accuracy", "maximize"),
    ("tr_acc 0.9 te_acc 0.5",): ("te_acc", "maximize"),
    ("holdout acc: 0.5 loss 0.3",): ("holdout_acc", "maximize"),
    ("LPIPS: 0.3",): ("lpips", "minimize"),
    ("Val. Loss: 0.4 | Val. Acc: 80.00%", "Test Loss: 0.3 | Test Acc: 81.00%"): ("val_acc", "maximize"),
    ("evaluation time 3.0 s, latest accuracy 0.4",): ("latest_accuracy", "maximize"),
    ("loss: 0.5 - accuracy: 0.9 - val_loss: 0.6 - val_accuracy: 0.8",): ("val_accuracy", "maximize"),
}


@pytest.mark.parametrize("lines", LINES)
def test_a_metric_is_of_held_out_data_and_goes_the_right_way(lines: tuple[str, ...]) -> None:
    found = metric_in(lines)
    assert found is not None
    assert found[1:] == LINES[lines]
    values = {value_of(one) for line in lines for one in metric_pattern(found[0]).finditer(line)}
    assert len(values) == 1


@pytest.mark.parametrize(
    "line", ["train/val acc: 0.95 / 0.81", "accuracy 0.9 - val 0.8", "top accuracy: 0.6"]
)
def test_what_may_be_of_training_data_or_a_running_best_is_none(line: str) -> None:
    assert metric_in([line]) is None


def test_of_several_lines_after_a_pass_one_is_meant() -> None:
    lines = ["Test: [0/9] Acc@1 3.1", " * Acc@1 3.2", "Test: [0/9] Acc@1 3.5", " * Acc@1 4.0"]
    found = metric_in(lines, passes=2)
    assert found is not None
    assert [value_of(one) for line in lines for one in metric_pattern(found[0]).finditer(line)] == [3.2, 4.0]


def seen(values: dict[str, float], **others: Any) -> dict[str, Any]:
    """What might be seen of a script."""
    rest = {
        "counts": [],
        "sums": False,
        "optimizer": "SGD",
        "samples": 600,
        "seed": None,
        "early": [],
        "loaders": [],
        "evaluates": False,
        "cut": False,
        "error": "",
    }
    return {
        "values": values,
        "batch": 64,
        "rates": [0.1],
        "passes": 5,
        "lines": ["acc 0.5"],
        **rest,
        **others,
    }


def test_a_number_of_passes_without_an_evaluation_is_of_training_data(folder: Path) -> None:
    text = (SCRIPTS / "quickstart.py").read_text()
    (folder / "final.py").write_text(
        text.replace("    evaluate(test_loader)", "    print('Accuracy: 0.9')\nevaluate(test_loader)")
    )
    found = looked_at("final.py", [])
    assert [line for line in found.early if "Accuracy" in line] == ["Accuracy: 0.9"] * 5
    assert (
        [line for line in found.lines if "Accuracy" in line]
        == [line for line in found.lines if "Test" in line]
        != []
    )


def test_flags_of_other_names_and_what_stays_is_said() -> None:
    found = found_in("a.py", [], seen({"-b": 64, "--lr": 0.1, "--niter": 5}, rates=[0.1, 0.003]))
    assert found.told == {"batch": "-b", "rate": "--lr", "epochs": "--niter"}
    assert (
        "other rates as they are: 0.003, no seed, so repeats differ only in their order of samples"
        in found.sentence()
    )
    cut = found_in("a.py", [], seen({"--bs": 64, "--lr": 0.1, "--epochs": 150}, passes=127, cut=True, seed=3))
    assert (cut.passes, cut.told["epochs"]) == (150, "--epochs")
    with pytest.raises(StudyFileError, match="tells its batch, 64"):  # two flags have the value
        found_in("a.py", [], seen({"--width": 64, "--size": 64, "--lr": 0.1, "--epochs": 5}))
    for values, passes, words in (
        ({"--epochs": 30.0}, 7, "It ended before --epochs 30: if it stops early"),
        ({"--epochs": 3.0}, 15, "It made 5 times --epochs 3: let it train once"),
        ({"--max-steps": 200.0}, 198, "A loop over --max-steps is not taken over"),
    ):
        with pytest.raises(StudyFileError, match=re.escape(words)):
            found_in("a.py", [], seen({"-b": 64, "--lr": 0.1, **values}, passes=passes))
    early = found_in(
        "a.py", [], seen({"-b": 64, "--lr": 0.1, "--epochs": 5}, early=["acc 0.9"], lines=["score: 0.5"])
    )
    assert early.metric[0] == "score:"


def test_numbers_in_modules_are_told_to_all_runs_of_an_examination(folder: Path) -> None:
    text = (SCRIPTS / "quickstart.py").read_text().replace("import torch\n", "import torch, settings\n", 1)
    (folder / "changed.py").write_text(text.replace("batch_size=16", "batch_size=settings.BATCH"))
    (folder / "settings.py").write_text("BATCH = 16\n")
    told = {"batch": "settings.py:BATCH", "rate": "lr=0.1", "epochs": "t in range(5)", "metric": "Accuracy:"}
    function = partial(run_script, script="changed.py", **told)  # type: ignore[arg-type]
    function.__name__ = "train"  # type: ignore[attr-defined]
    examination = examined_session(function, replace(own(folder, 24), smallest_micro_batch=2))
    assert (examination.verdict, examination.findings) == ("exact", ()), examination.lines


def test_several_numbers_of_a_module_are_told_at_once(folder: Path) -> None:
    (folder / "settings.py").write_text("FIRST = dict(size=16)\nSECOND = dict(size=16)\n")
    values = {"settings.py:size=16": 3, "settings.py:size=16 #2": 4}
    changed = _ModulesChanged(values, folder)
    assert changed.left == {}
    with changed, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        settings = importlib.import_module("settings")
        del sys.modules["settings"]
    assert (settings.FIRST["size"], settings.SECOND["size"]) == (3, 4)
    assert _ModulesChanged({"settings.py:none=1": 2}, folder).left == {"settings.py:none=1": 2}


def test_what_a_script_counts_itself_begins_anew(folder: Path, tmp_path: Path) -> None:
    text = (SCRIPTS / "quickstart.py").read_text()
    counts = "        optimizer.step()\n        steps.append(1)\n        optimizer.param_groups[0]['lr'] = 0.1 / len(steps)\n"
    (folder / "counts.py").write_text(
        text.replace("        optimizer.step()\n", counts).replace("for t in", "steps = []\nfor t in")
    )
    told = {
        "batch": "batch_size=16",
        "rate": "lr=0.1",
        "epochs": "t in range(5)",
        "metric": "Accuracy:",
        "splits": False,
    }
    made = own(folder, 20, epochs=2)
    whole = [one.accuracy for one in run_script(made, "counts.py", **told)]  # type: ignore[arg-type]
    kept = replace(made, checkpoint=f"file://{tmp_path}/kept/checkpoint.pt", checkpoint_every_s=0.0)
    next(run_script(kept, "counts.py", resumes=False, **told))  # type: ignore[arg-type]
    again = list(run_script(kept, "counts.py", resumes=False, **told))  # type: ignore[arg-type]
    assert [one.accuracy for one in again] == whole
    assert "resumed_at" not in again[-1].facts


def test_the_scripts_code_is_a_part_of_the_study(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "my-train.py").write_text("import helper\nLR = 1\n")
    (folder / "sub" / "helper.py").write_text("x = 1\n")
    (folder / "tasks.py").write_text(
        "def train(setup):\n    yield from run_script(setup, 'sub/my-train.py', '')\n"
    )
    reference = f"{folder}/tasks.py:train"
    assert {path.name for path in sources_of(reference)} == {"tasks.py", "my-train.py", "helper.py"}
    before = task_code_hash(reference)
    (folder / "sub" / "helper.py").write_text("x = 2\n")
    assert task_code_hash(reference) != before


def test_metrics_are_found_in_other_peoples_lines() -> None:
    for line, text in {
        "epoch 0: {'accuracy': 0.5625}": "accuracy':",
        "Accuracy (%): 7.8125\t Error rate (%): 92.1875": "Accuracy (%):",
        "Accuracy of the network on the 10000 test images: 50.0 %": "Accuracy of the network on the 10000 test images:",
        "Test: [1/2]\tTime 0.269 Loss 6.9e+00 (6.9e+00)\tAcc@1   1.50 (  0.00)": "Acc@1",
    }.items():
        found = metric_in([line])
        assert found is not None, line
        assert re.sub(r"\\", "", found[0]) == text
        assert len({value_of(one) for one in metric_pattern(found[0]).finditer(line)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("plain", {"batch": "--batch-size", "rate": "--lr", "epochs": "--epochs", "seed": "--seed"}),
        ("constants", {"batch": "BATCH_SIZE", "rate": "LR", "epochs": "EPOCHS"}),
        pytest.param(
            "by_hand",
            {"batch": "--batch_size", "rate": "--learning_rate", "epochs": "--epochs"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "summed",
            {"batch": "--batch-size", "rate": "--lr", "epochs": "--num-epochs"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_how_a_script_is_told_is_found(folder: Path, name: str, told: dict[str, str]) -> None:
    found = script_of(["python", f"{name}.py"], folder)
    assert bool(found.counts) == (name == "by_hand")
    assert {what: how for what, how in found.told.items() if what != "seed" or "seed" in told} == told
    assert not (folder / "model.pt").exists()


@pytest.mark.slow
@pytest.mark.long
def test_what_is_not_found_is_asked_for(folder: Path) -> None:
    with pytest.raises(StudyFileError, match="no training was found"):
        script_of(["python", "no_loader.py"], folder)
    hidden = (folder / "constants.py").read_text().replace("BATCH_SIZE = 20", "size = int(20)")
    (folder / "hidden.py").write_text(hidden.replace("BATCH_SIZE", "size"))
    with pytest.raises(
        StudyFileError,
        match=r"expected a flag, a number in its text, or a file that tells its batch, 20; it has LR 0.01",
    ):
        script_of(["python", "hidden.py"], folder)


@pytest.mark.slow
def test_a_script_is_one_command_and_is_killed_and_goes_on(folder: Path) -> None:
    command = [
        str(BSEARCH),
        "run",
        "--serial",
        "--set",
        "budget.trials=12",
        "--set",
        "budget.profile_s=0.5",
        "--",
        "python",
        "plain.py",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
    )
    while len(finished(folder / "plain.db")) < 4:
        assert first.poll() is None
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before = finished(folder / "plain.db")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it goes on" in done.stdout
    after = finished(folder / "plain.db")
    assert before.items() <= after.items()
    assert len(after) == 12
    other = bsearch("run", "--serial", "--", "python", "plain.py", "--lr", "2")
    assert (other.exit_code, "of another command" in other.output) == (2, True)
    kept = bsearch("train", "study.yaml", "--serial", "--pick", "best", "--keep", "kept")
    assert kept.exit_code == 0, kept.output
    state = torch.load("kept/model.pt", weights_only=True)
    accuracy = json.loads((folder / "kept" / "training.json").read_text())["accuracy"]
    assert accuracy == max(values[1] for values in after.values())
    evaluates = [sys.executable, "plain.py", "--seed", "1", "--evaluate", "kept/model.pt"]  # the script's own
    said = subprocess.run(evaluates, capture_output=True, text=True, check=True).stdout
    assert [value_of(one) for one in metric_pattern("Accuracy:").finditer(said)] == [accuracy]
    assert [*state] == ["0.weight", "0.bias", "3.weight", "3.bias"]
