"""A number in what a script writes is read as it is meant, or refused with its line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from bsearch.objectives.script.metric import metric_pattern, value_of
from bsearch.spaces.errors import TaskError
from helpers import bsearch

PLAIN = {
    "acc: 9/10 (90%)": 0.9,
    "acc: 9/10, loss 3": 0.9,
    "acc: 98.5 %": 0.985,
    "acc: 72.5 / 91.2": 72.5,
    "acc: 0.94,loss:0.3": 0.94,
    "acc: 0.94, 0.3": 0.94,
    "acc=1e-3": 1e-3,
    "acc: 7.8e+00 (6.9e+00)": 7.8,
    "acc (%): 12.": 12.0,
    "acc: -inf": -math.inf,
    "acc: .5.": 0.5,
}
NOT_PLAIN = (
    "0,940",
    "1.2k",
    "1_000",
    "1,234",
    "1,234.5",
    "1'000",
    "9850/10,000",
    "9/10k",
    "1.2.3",
    "0.5s",
    "0x1F",
    "0.94,0.3",
)


@pytest.mark.parametrize("text", PLAIN)
def test_a_plain_number_is_read(text: str) -> None:
    (found,) = metric_pattern("acc").finditer(text)
    assert value_of(found) == PLAIN[text]


@pytest.mark.parametrize("number", NOT_PLAIN)
def test_a_number_that_is_not_plain_is_refused_with_its_line(number: str) -> None:
    (found,) = metric_pattern("accuracy").finditer(f"epoch 1: val accuracy: {number} of it\n")
    with pytest.raises(TaskError) as error:
        value_of(found)
    assert f"got 'accuracy: {number}' in 'epoch 1: val accuracy: {number} of it'" in str(error.value).replace(
        '"', "'"
    )


@pytest.mark.parametrize("word", ["information", "nanosecond", "info"])
def test_a_word_is_no_number(word: str) -> None:
    assert not metric_pattern("acc:").search(f"acc: {word}")


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(40, 3), torch.randint(2, (40,))), batch_size=8, shuffle=True)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    print(f"val accuracy: {0.9:.3f}".replace(".", ","))
"""


@pytest.mark.slow
def test_a_script_of_another_locale_is_refused_before_the_first_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    done = bsearch("init", "--", "python", "train.py")
    assert done.exit_code
    assert "got 'val accuracy: 0,900' in 'val accuracy: 0,900'" in done.output
    assert not Path("study.yaml").exists()
