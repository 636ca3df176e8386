"""A study around its examination: what is refused before the first trial, what a coupled loss does to its plans, and what the
front says where a study went on all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bsearch.search.report.page.page import report_page
from bsearch.search.report.page.study_data import StudyData
from bsearch.search.run.profiles import stored_profiles
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.errors import StudyFileError, TaskError
from conftest import TASKS, small_study
from helpers import bsearch, run
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import f1_score, roc_auc_score

COUPLED = '''
import torch
from bsearch import Data, Loss, Score, Task
from torch.utils.data import TensorDataset

x = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))

class Contrast(Task):
    """SimCLR's loss over noisy views."""

    couples_samples = {declared}

    def data(self, setup):
        return Data(TensorDataset(x), TensorDataset(x[:100]))

    def model(self, setup):
        return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))

    def loss(self, model, batch, setup):
        (x,) = batch
        views = torch.cat([x, x + 0.3 * torch.randn_like(x)])
        z = torch.nn.functional.normalize(model(views), dim=1)
        near = (z @ z.T / 0.2).fill_diagonal_(float("-inf"))
        pairs = torch.arange(2 * len(x)).roll(len(x))
        return Loss(torch.nn.functional.cross_entropy(near, pairs, reduction="sum") / 2, len(x))

    def score(self, model, batch, setup):
        z = model(batch[0])
        return {{"accuracy": Score((z.square().mean(1) < 1).sum(), len(z))}}
'''


def write(folder: Path, *, declared: bool) -> str:
    (folder / "coupled.py").write_text(COUPLED.format(declared=declared))
    return "coupled.py:Contrast"


def test_a_loss_that_compares_samples_is_refused_with_the_way_out(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = study_file(task=write(tmp_path, declared=False))
    with pytest.raises(
        TaskError, match=r"coupled.py:\d+: Contrast.loss, on training data: .* couples_samples = True"
    ):
        run(path)
    done = bsearch("check", path)
    assert done.exit_code == 2 and "couples_samples = True" in done.output and "accept_inexact" in done.output


@pytest.mark.slow
@pytest.mark.long
def test_a_declared_one_is_never_split_and_its_largest_batch_is_what_fits(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    space = {**small_study()["space"], "effective_batch": {"low": 16, "high": 600}}
    path = study_file(
        task=write(tmp_path, declared=True),
        space=space,
        memory={"limit": "1104KiB"},
        budget={"trials": 5},
    )
    done = run(path)
    assert not done.failure
    records = done.study.records
    assert len([one for one in records if one.outcome == "complete"]) == 5
    assert {record.facts.accumulation for record in records} == {1}
    (profile,) = stored_profiles(done.study, done.study.tables()).values()
    cap = profile.largest_micro_batch
    assert cap is not None and 32 < cap < 600, "the limit is what ends the batches"
    assert max(record.facts.effective_batch or 0 for record in records) <= cap
    assert profile.examination is not None and profile.examination.verdict == "unsplit"
    # 1,200 samples are no multiple of most batches: a remainder is a step of its own, never more than fits.
    shown = bsearch("check", path).output.replace("\n", " ")
    assert "batches are never split, as the training code says (couples_samples" in shown
    assert f"feasible batches: 16 to {cap}" in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"devices": {"per_trial": 2, "cpus": 1}},
            "devices.per_trial: expected 1, because the loss compares",
        ),
        (
            {"accumulation": {"low": 1, "high": 4}},
            "space.accumulation: expected 1, because the loss compares",
        ),
    ],
)
def test_what_would_split_it_is_refused(
    study_file: Callable[..., Path], tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    space = small_study()["space"]
    if "accumulation" in changes:
        space, changes = {**space, **changes}, {}
    with pytest.raises(StudyFileError, match=message):
        run(study_file(task=write(tmp_path, declared=True), space=space, **changes))


def test_a_study_may_go_on_all_the_same_and_its_front_says_so(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = study_file(
        task=f"{TASKS}:MeanScore", training={"evaluations": 1, "accept_inexact": True}, budget={"trials": 3}
    )
    lines: list[str] = []
    done = run(path, notify=lambda event: lines.append(event.text))
    assert not done.failure
    assert any("examined: inexact" in line and "MeanScore.score" in line for line in lines)
    shown = bsearch("show", path).output.replace("\n", " ")
    assert "Not exact (training.accept_inexact)" in shown and "error: expected a ratio of sums" in shown
    assert "Examined: inexact" in report_page(StudyData.of(StoredStudy.open(str(path))))
    # Without the key it is refused, although the profile is stored.
    path.write_text(path.read_text().replace("accept_inexact: true", "accept_inexact: false"))
    path.write_text(path.read_text().replace("trials: 3", "trials: 4"))
    again = bsearch("run", path, "--serial")
    assert again.exit_code == 2 and "accept_inexact: true" in again.output


@pytest.mark.slow
def test_check_and_run_say_what_was_examined(study_file: Callable[..., Path]) -> None:
    path = study_file()
    checked = bsearch("check", path, "--json")
    examination = json.loads(checked.stdout)["examination"]
    assert examination["verdict"] == "exact"
    assert (
        "samples has the same gradient unsplit and in " in examination["text"]
        and "in float64" in examination["text"]
    )
    shown = bsearch("check", path).output.replace("\n", " ")
    assert "samples has the same gradient unsplit and in " in shown


def test_a_profile_of_an_earlier_version_is_examined_anew(study_file: Callable[..., Path]) -> None:
    path = study_file(budget={"trials": 1})
    study = run(path).study
    tables = study.tables()
    ((about, profile),) = tables.profiles()
    earlier = profile.to_dict()
    del earlier["examination"]
    tables.save_profile(json.dumps(about, sort_keys=True), earlier)
    path.write_text(path.read_text().replace("trials: 1", "trials: 2"))
    again = run(path).study
    (profile_now,) = stored_profiles(again, again.tables()).values()
    assert profile_now.examination is not None


TABLE = """
import torch
from bsearch import Data, Loss, Score, Task, WholeSet
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import f1_score
from torch.utils.data import TensorDataset
from torchmetrics.classification import BinaryAUROC

table = load_breast_cancer()
x = torch.tensor((table.data - table.data.mean(0)) / table.data.std(0), dtype=torch.float32)
y = torch.tensor(table.target)


class Tumours(Task):
    def data(self, setup):
        return Data(TensorDataset(x[:400], y[:400]), TensorDataset(x[400:], y[400:]))

    def model(self, setup):
        return torch.nn.Sequential(torch.nn.Linear(30, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def score(self, model, batch, setup):
        inputs, labels = batch
        logits = model(inputs)
        macro = lambda logits, labels: f1_score(labels, logits.argmax(-1), average="macro")
        return {"auroc": WholeSet(BinaryAUROC(), logits.softmax(-1)[:, 1], labels), "f1": WholeSet(macro, logits, labels)}
"""


def test_the_fronts_auroc_is_scikit_learns_of_the_kept_model(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "table.py").write_text(TABLE)
    path = study_file(task="table.py:Tumours", objectives={"metric": {"name": "auroc"}}, budget={"trials": 4})
    front = run(path).study.front
    best = front.best
    assert best is not None and best.accuracy is not None
    kept = bsearch("train", path, "--pick", "best", "--serial", "--keep", tmp_path / "kept")
    assert kept.exit_code == 0, kept.output
    model = torch.nn.Sequential(torch.nn.Linear(30, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    (weights,) = (tmp_path / "kept").rglob("model.pt")
    model.load_state_dict(torch.load(weights, weights_only=True))
    table = load_breast_cancer()
    inputs = torch.tensor((table.data - table.data.mean(0)) / table.data.std(0), dtype=torch.float32)[400:]
    with torch.no_grad():
        logits = model(inputs)
    right = roc_auc_score(table.target[400:], logits.softmax(-1)[:, 1])
    assert best.accuracy == pytest.approx(right, abs=1e-6)
    macro = f1_score(table.target[400:], logits.argmax(-1), average="macro")
    assert best.facts.extra["f1"] == pytest.approx(macro, abs=1e-9)
