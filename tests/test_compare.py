"""`bsearch compare`: what it says, and its exit codes."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from bsearch.search.compare.revision import Revision
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.errors import StudyFileError
from click.testing import Result
from helpers import bsearch, validated

STUDY = """study: {name}
task: tasks.py:Mine
space:
  effective_batch: {{low: 8, high: 64}}
  reference_rate: {{low: 0.02, high: 0.5, at_batch: 64}}
  rule: sqrt
  epochs: 2
budget: {{trials: 6, profile_s: 0.5}}
"""
TASK = "from bsearch.objectives.digits import Digits\n\n\nclass Mine(Digits):\n    pass\n"
# A bug, in a file that is read from the current folder: a gradient that is far too small.
SCALED = "from pathlib import Path\n\nGAIN = float(Path('gain.txt').read_text())\n" + TASK.replace(
    "    pass",
    """    def loss(self, *given):
        found = super().loss(*given)
        return type(found)(found.total * GAIN, found.denominator)""",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compared(*arguments: str) -> Result:
    return bsearch("compare", *arguments)


def git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.email=a@b", "-c", "user.name=a", *words],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def committed() -> None:
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")


def table(name: str, seed: int, gain: float = 0.0, metric: str = "val_acc", count: int = 18) -> str:
    """Runs made elsewhere."""
    rng = np.random.default_rng(seed)
    with open(name, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["batch_size", "lr", metric, "seconds"])
        for _ in range(count):
            batch, power = int(rng.choice([8, 16, 32, 64, 128])), rng.uniform(-2.5, -0.3)
            score = (
                0.9
                - 0.03 * (power + 1.2) ** 2
                - 0.01 * abs(np.log2(batch / 32))
                + gain
                + 0.003 * rng.standard_normal()
            )
            rows.writerow([batch, 10**power, score, 300 / batch + 3])
    return name


def test_runs_that_exist_have_an_exit_code_by_verdict() -> None:
    before, after, same, few = (
        table("a.csv", 1),
        table("b.csv", 2, 0.03),
        table("c.csv", 3),
        table("d.csv", 4, count=4),
    )
    for sides, code, words in (
        ([before, after], 0, "b is better"),
        ([after, before], 1, "a is worse"),
        ([after, before, "--margin", "0.1"], 0, "a is not worse by more than 0.1"),
        ([before, same], 2, "c may be better or worse"),
        ([before, few], 2, "Cannot tell: expected at least 6 finished runs of each side"),
    ):
        done = compared(*sides)
        assert (done.exit_code, words in done.stdout) == (code, True), done.output
    document = validated(compared(before, after, "--json").stdout)
    assert (document["verdict"], document["metric"], [side["runs"] for side in document["sides"]]) == (
        "better",
        "val_acc",
        [18, 18],
    )
    assert document["within"][-1]["low"] < 0.03 < document["within"][-1]["high"] + 0.01


def test_what_cannot_be_compared_has_a_code_of_its_own(folder: Path) -> None:
    (folder / "tasks.py").write_text(TASK)
    (folder / "study.yaml").write_text(STUDY.format(name="one"))
    before, loss = table("a.csv", 1), table("loss.csv", 2, metric="val_loss")
    for sides, words in (
        ([before], "expected two studies or sources of runs"),
        ([before, "nowhere.csv"], "nowhere.csv"),
        ([before, loss], "expected one metric, got val_acc (maximize) and val_loss (minimize)"),
        (["study.yaml", "study.yaml"], "expected two studies, got one twice"),
        (["study.yaml", "--against", "HEAD"], "expected a revision of the git repository"),
        ([before, loss, "--trials", "20"], "runs that exist are only compared"),
        (["study.yaml", "study.yaml", "--trials", "20", "--within", "1h"], "got both"),
        ([before, loss, "--within", "soon"], "expected a duration"),
        ([before, loss, "--bogus"], "No such option"),
    ):
        done = compared(*sides)
        assert (done.exit_code, words in done.output) == (3, True), (sides, done.output)


@pytest.mark.slow
def test_a_bug_is_told_by_training_both_sides_and_nothing_is_trained_twice(folder: Path) -> None:
    (folder / "tasks.py").write_text(SCALED)
    (folder / "gain.txt").write_text("1")
    (folder / "study.yaml").write_text(STUDY.format(name="digits"))
    committed()
    (folder / "gain.txt").write_text("0.002")
    (folder / "weights.bin").write_text("not in git")
    arguments = ["study.yaml", "--against", "HEAD", "--serial", "--trials", "12"]
    done = compared(*arguments)
    assert done.exit_code == 1, done.output
    (old,) = (folder / ".git" / "bsearch").iterdir()
    assert (old / "gain.txt").read_text() == "1"
    assert (old / "weights.bin").read_text() == "not in git"
    assert "Both were scored on the same validation samples." in done.output
    seeds = [record.facts.seed for record in StoredStudy.open("study.yaml").records]
    assert sorted(map(str, seeds)) == ["0", "1", "2", "3", "4", "5"]
    trained = done.output.count("complete:")
    assert trained == 12
    (folder / "later.bin").write_text("not in git")
    again = compared(*arguments)
    assert (old / "later.bin").exists()
    assert (again.exit_code, again.output.count("complete:")) == (1, 0)
    fewer = "    def data(self, setup):\n        data = super().data(setup)\n        return type(data)(data.train, data.test)\n"
    (folder / "tasks.py").write_text(
        TASK.replace("    pass", fewer.replace("data.test", "Subset(data.test, range(200))"))
    )
    (folder / "tasks.py").write_text(
        "from torch.utils.data import Subset\n" + (folder / "tasks.py").read_text()
    )
    (folder / "study.yaml").write_text(STUDY.format(name="other"))
    other = compared(str(old / "study.yaml"), "study.yaml", "--serial", "--trials", "12")
    assert (
        other.exit_code,
        "same validation data on both sides, got 300 and 200 samples" in other.output,
    ) == (3, True)


def test_a_metric_to_minimize_is_told_in_its_own_unit() -> None:
    before, after = table("a.csv", 1, metric="val_loss"), table("b.csv", 2, 0.03, metric="val_loss")
    # Of a loss, the tables' best is the lowest.
    for name in (before, after):
        lines = Path(name).read_text().splitlines()
        rows = [line.split(",") for line in lines[1:]]
        Path(name).write_text("\n".join([lines[0], *(f"{a},{b},{1 - float(c)},{d}" for a, b, c, d in rows)]))
    done = compared(before, after)
    assert (done.exit_code, "by val_loss, of which lower is better" in done.output) == (0, True), done.output
    assert "b is better: by -0.0" in done.output
    within = validated(compared(before, after, "--json").stdout)["within"][-1]
    assert within["low"] < within["difference"] < within["high"] < 0


def test_a_revision_has_no_code_of_today(folder: Path) -> None:
    (folder / "study.yaml").write_text(STUDY.format(name="digits"))
    git("init", "-q")
    (folder / "other.txt").write_text("x")
    git("add", "other.txt")
    git("commit", "-qm", "one")
    done = compared("study.yaml", "--against", "HEAD", "--serial", "--trials", "12")
    assert (done.exit_code, "study.yaml is not in that revision" in done.output) == (3, True), done.output


def test_a_revision_runs_where_its_own_files_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads from the current folder, imports by a computed name, or asks git for, in processes of its own too."""
    for name in ("study.yaml", "lib/plugin_of_a_side.py", "sub/conf.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("SIDE = 'then'")
    committed()
    for name in ("lib/plugin_of_a_side.py", "sub/conf.txt"):
        (folder / name).write_text("SIDE = 'today'")
    (folder / "new").mkdir()
    (folder / "new" / "code.py").write_text("")
    before = {path for path in (folder / ".git").rglob("*") if path.is_file()}
    monkeypatch.chdir(folder / "sub")
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'lib'}{os.pathsep}relative")
    monkeypatch.syspath_prepend(folder / "lib")
    monkeypatch.setenv("GIT_DIR", "nowhere")  # as in a hook
    asks = (
        "import os, plugin_of_a_side as one; print(one.SIDE, open('conf.txt').read(), os.getenv('GIT_DIR'))"
    )
    found = []
    revision = Revision.of(folder / "study.yaml", "HEAD")
    for apart in (nullcontext, revision.entered):
        with apart():
            there = subprocess.run(
                [sys.executable, "-c", asks], capture_output=True, text=True, check=True
            ).stdout
            found.append((Path("conf.txt").read_text(), there))
    assert found == [
        ("SIDE = 'today'", "today SIDE = 'today' None\n"),
        ("SIDE = 'then'", "then SIDE = 'then' None\n"),
    ]
    assert (Path.cwd(), os.environ["PYTHONPATH"]) == (folder / "sub", f"{folder / 'lib'}{os.pathsep}relative")
    assert sys.prefix in "".join(sys.path)
    after = {path for path in (folder / ".git").rglob("*") if path.is_file()}
    assert {path.relative_to(folder / ".git").parts[0] for path in after - before} == {"bsearch"}
    monkeypatch.chdir(folder / "new")
    with (
        pytest.raises(StudyFileError, match="expected a current folder that the revision has"),
        revision.entered(),
    ):
        pass


def test_equal_results_at_every_setting_are_said(folder: Path) -> None:
    before = table("a.csv", 1)
    (folder / "b.csv").write_text(Path(before).read_text())
    done = compared(before, "b.csv")
    assert "identical results at every setting that both trained" in " ".join(done.output.split()), (
        done.output
    )
    assert validated(compared(before, "b.csv", "--json").stdout)["same_results"]
    assert "identical" not in compared(before, table("c.csv", 3)).output
