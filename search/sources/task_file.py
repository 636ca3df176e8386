"""The training code of a study made of runs, as far as the runs tell it: what they searched, and what is compared."""

from __future__ import annotations

from keyword import iskeyword

from ...spaces.domain import Domain, Range, values_of
from ...spaces.study.spec import StudySpec

_FILE = '''"""Training code for study.yaml, made of {source} by `bsearch init --from`: fill in what raises TaskError."""

import torch  # noqa: F401
from bsearch import Data, Loss, Score, Task, TaskError, TrialSetup  # noqa: F401
from torch import nn


class MyTask(Task):
    def data(self, setup: TrialSetup) -> Data:
        """Any map-style torch datasets: training data, and the validation data of {metric}."""
        raise TaskError("tasks.py is to be filled in: data here, then model{and_score} below it")
        return Data(train, validation)  # noqa: F821

    def model(self, setup: TrialSetup) -> nn.Module:
        """Your model; what is a parameter of the optimizer or of the loss is read there, as setup.parameters[name]."""
{parameters}        raise TaskError("tasks.py is to be filled in: model here, a torch.nn.Module")

    def score(self, model, batch, setup):
        """{metric}, the metric of study.yaml ({direction}): its sum over the batch, and what the mean divides by."""
        inputs, labels = batch
{score}        return Score({variable}, len(labels))

    # The defaults are cross-entropy and SGD with Nesterov momentum. Override them as your runs had it:
    #
    # def loss(self, model, batch, setup):  # the sum over the batch, and what the mean divides by
    #     inputs, labels = batch
    #     return Loss(nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels))
    #
    # def optimizer(self, model, setup):  # with setup.betas and setup.weight_decay, as study.yaml has them
    #     return torch.optim.AdamW(model.parameters(), setup.learning_rate, setup.betas, weight_decay=setup.weight_decay)
'''
# By the last word of a metric's name, as a sum over a batch.
_SUMS = dict.fromkeys(("loss", "nll"), 'nn.functional.cross_entropy(model(inputs), labels, reduction="sum")')
_SUMS |= dict.fromkeys(("acc", "acc1", "accuracy", "top1"), "(model(inputs).argmax(-1) == labels).sum()")
_SUMS |= dict.fromkeys(("err", "error"), "(model(inputs).argmax(-1) != labels).sum()")


def task_file(spec: StudySpec, source: str) -> str:
    """The text of tasks.py, in which data and model are left to be filled in, and a metric that is not a usual one.

    Args:
        spec: of the runs.
        source: the runs', for the file's first line.
    """
    metric = spec.objectives.metric
    known = _SUMS.get(metric.name.removesuffix("_lowest").removesuffix("_highest").rpartition("_")[2])
    variable = _variable(metric.name)
    score = f"        {variable} = {known}\n"
    if known is None:
        score = (
            f'        raise TaskError("tasks.py is to be filled in: score here, {metric.name} of a batch")\n'
            f"        {variable} = model(inputs)\n"
        )
    searched = {
        name: domain for name, domain in spec.space.task_parameters().items() if name in spec.searched()
    }
    lines = (f"        {_variable(name)} = {_read(name, domain)}\n" for name, domain in searched.items())
    return _FILE.format(
        source=ascii(source)[1:-1].replace('"', "'"),
        metric=metric.name,
        variable=variable,
        direction=f"{'lower' if metric.direction == 'minimize' else 'higher'} is better",
        and_score=" and score" if known is None else "",
        parameters="".join(lines),
        score=score,
    )


# Names that the file itself uses.
_TAKEN = frozenset(
    {"setup", "self", "torch", "nn", "model", "inputs", "labels", "batch", "Data", "Loss", "Score", "Task"}
)


def _variable(name: str) -> str:
    """A name as one of Python's."""
    if name.isidentifier() and not iskeyword(name) and name not in _TAKEN:
        return name
    return "of_" + "".join(letter if f"a{letter}".isidentifier() else "_" for letter in name)


def _read(name: str, domain: Domain) -> str:
    """How a parameter is read: as a number, where all of its values are some."""
    read = f'setup.parameters["{name}"]'
    kinds = {type(value) for value in values_of(domain)}
    if isinstance(domain, Range):
        return f"{'int' if domain.whole else 'float'}({read})"
    return f"int({read})" if kinds == {int} else f"float({read})" if kinds <= {int, float} else read
