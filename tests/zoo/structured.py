"""Graphs, several heads, numbers: batches and targets of other shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from bsearch.objectives.task import Data, Loss, Score, Task
from bsearch.spaces.trial import TrialSetup
from sklearn.datasets import make_classification, make_friedman1
from sklearn.metrics import accuracy_score, f1_score, mean_squared_error, r2_score, roc_auc_score
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from torchmetrics.classification import BinaryAUROC
from zoo.api import WholeSet
from zoo.plain import RATE, Step, digits, trained, whole

# Graphs


@cache
def molecules() -> list[SimpleNamespace]:
    """Random graphs of 2 to 9 nodes; a graph's class is how many edges it has, modulo 3."""
    generator = torch.Generator().manual_seed(10)
    graphs = []
    for _ in range(400):
        nodes = int(torch.randint(2, 10, (1,), generator=generator))
        edges = torch.randint(
            0, nodes, (2, int(torch.randint(1, 3 * nodes, (1,), generator=generator))), generator=generator
        )
        features = torch.randn(nodes, 4, generator=generator)
        graphs.append(SimpleNamespace(x=features, edges=edges, label=edges.shape[1] % 3))
    return graphs


class Graphs(Dataset[Any]):
    def __init__(self, part: slice) -> None:
        self.graphs = molecules()[part]

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> SimpleNamespace:
        return self.graphs[index]


def as_one_graph(graphs: list[SimpleNamespace]) -> SimpleNamespace:
    """As torch_geometric does it: nodes side by side, edges shifted, and for each node the graph that it belongs to."""
    starts = torch.tensor([0, *(len(graph.x) for graph in graphs)]).cumsum(0).tolist()
    return SimpleNamespace(
        x=torch.cat([graph.x for graph in graphs]),
        edges=torch.cat([graph.edges + start for graph, start in zip(graphs, starts, strict=False)], 1),
        graph=torch.cat([torch.full((len(graph.x),), number) for number, graph in enumerate(graphs)]),
        labels=torch.tensor([graph.label for graph in graphs]),
        num_graphs=len(graphs),
    )


class Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, batch: SimpleNamespace) -> Tensor:
        source, target = batch.edges
        hidden = self.first(batch.x).tanh()
        received = torch.zeros_like(hidden).index_add(0, target, hidden[source])
        hidden = self.second(hidden + received).tanh()
        return self.head(hidden.new_zeros(batch.num_graphs, 16).index_add(0, batch.graph, hidden))


class GraphClasses(Task):
    def data(self, setup: TrialSetup) -> Data:
        return Data(Graphs(slice(0, 300)), Graphs(slice(300, 400)), collate=as_one_graph)

    def model(self, setup: TrialSetup) -> nn.Module:
        return Messages()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        return Loss(F.cross_entropy(model(batch), batch.labels, reduction="sum"), batch.num_graphs)

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Score:
        return Score((model(batch).argmax(1) == batch.labels).sum(), batch.num_graphs)


def graph_logits(model: Messages, graph: SimpleNamespace) -> Tensor:
    """With the adjacency matrix of one graph, (nodes, nodes)."""
    adjacency = torch.zeros(len(graph.x), len(graph.x))
    for source, target in graph.edges.T.tolist():
        adjacency[target, source] += 1
    hidden = model.first(graph.x).tanh()
    hidden = model.second(hidden + adjacency @ hidden).tanh()
    return model.head(hidden.sum(0))


def graph_classes(steps: Sequence[Step]) -> list[float]:
    graphs = molecules()
    torch.manual_seed(0)
    model = Messages()

    def loss(step: Step) -> Tensor:
        logits = torch.stack([graph_logits(model, graphs[sample]) for sample in whole(step)])
        return F.cross_entropy(logits, torch.tensor([graphs[sample].label for sample in whole(step)]))

    return trained(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True), steps, loss)


def graph_metrics() -> dict[str, float]:
    torch.manual_seed(0)
    model = Messages()
    graphs = molecules()[300:]
    return {
        "accuracy": accuracy_score(
            [graph.label for graph in graphs], [int(graph_logits(model, graph).argmax()) for graph in graphs]
        )
    }


# Several heads


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.kind, self.ink = nn.Linear(32, 10), nn.Linear(32, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        body = self.body(images)
        return self.kind(body), self.ink(body).squeeze(1)


class MultiTask(Task):
    """A digit's class, and how much ink it takes; the second counts less."""

    def data(self, setup: TrialSetup) -> Data:
        images, labels = digits()
        values = images, labels, images.sum((1, 2, 3)) / 10
        return Data(
            *(TensorDataset(*(one[part] for one in values)) for part in (slice(0, 600), slice(600, 800)))
        )

    def model(self, setup: TrialSetup) -> nn.Module:
        return TwoHeads()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels, ink = batch
        logits, found = model(images)
        total = F.cross_entropy(logits, labels, reduction="sum") + 0.3 * F.mse_loss(
            found, ink, reduction="sum"
        )
        return Loss(total, len(labels))

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        images, labels, ink = batch
        logits, found = model(images)
        return {
            "accuracy": Score((logits.argmax(1) == labels).sum(), len(labels)),
            "ink_error": Score((found - ink).abs().sum(), len(ink)),
        }


def multi_task(steps: Sequence[Step]) -> list[float]:
    images, labels = digits()
    torch.manual_seed(0)
    model = TwoHeads()

    def loss(step: Step) -> Tensor:
        chosen = images[whole(step)]
        logits, found = model(chosen)
        return F.cross_entropy(logits, labels[whole(step)]) + 0.3 * F.mse_loss(
            found, chosen.flatten(1).sum(1) / 10
        )

    return trained(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True), steps, loss)


# Numbers


@cache
def numbers() -> tuple[Tensor, Tensor]:
    inputs, targets = make_friedman1(800, noise=0.5, random_state=12)
    return torch.from_numpy(inputs), torch.from_numpy(targets / 10)


def regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1)).double()


class Regression(Task):
    """NumPy's numbers are double, and so is the model."""

    def data(self, setup: TrialSetup) -> Data:
        return Data(
            *(
                TensorDataset(*(values[part] for values in numbers()))
                for part in (slice(0, 600), slice(600, 800))
            )
        )

    def model(self, setup: TrialSetup) -> nn.Module:
        return regressor()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        inputs, targets = batch
        return Loss(F.mse_loss(model(inputs).squeeze(-1), targets, reduction="sum"), len(targets))

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        inputs, targets = batch
        found = model(inputs).squeeze(-1)
        return {"rmse": Score(((found - targets) ** 2).sum(), len(targets), of=math.sqrt)}


def regression(steps: Sequence[Step]) -> list[float]:
    inputs, targets = numbers()
    torch.manual_seed(0)
    model = regressor()
    return trained(
        torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True),
        steps,
        lambda step: F.mse_loss(model(inputs[whole(step)]), targets[whole(step), None]),
    )


def regression_metrics() -> dict[str, float]:
    inputs, targets = (values[600:] for values in numbers())
    torch.manual_seed(0)
    return {"rmse": mean_squared_error(targets, regressor()(inputs)[:, 0].detach()) ** 0.5}


class Determination(Regression):
    """R², which compares errors with the spread of the whole set."""

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        inputs, targets = batch
        return {
            "r2": WholeSet(lambda found, right: r2_score(right, found), model(inputs).squeeze(-1), targets)
        }


def determination_metrics() -> dict[str, float]:
    inputs, targets = (values[600:] for values in numbers())
    torch.manual_seed(0)
    found = regressor()(inputs)[:, 0].detach()
    return {"r2": float(1 - ((targets - found) ** 2).sum() / ((targets - targets.mean()) ** 2).sum())}


# Metrics of rare classes


@cache
def rare() -> tuple[Tensor, Tensor]:
    """One sample of eight is positive."""
    inputs, labels = make_classification(
        900, 8, n_informative=5, weights=[0.88], class_sep=0.7, random_state=13
    )
    return torch.tensor(inputs, dtype=torch.float32), torch.from_numpy(labels)


def screening() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))


class Screening(Task):
    """Ranked by AUROC over the whole set."""

    def data(self, setup: TrialSetup) -> Data:
        return Data(
            *(
                TensorDataset(*(values[part] for values in rare()))
                for part in (slice(0, 600), slice(600, 900))
            )
        )

    def model(self, setup: TrialSetup) -> nn.Module:
        return screening()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        inputs, labels = batch
        return Loss(
            F.binary_cross_entropy_with_logits(model(inputs), labels.float(), reduction="sum"), len(labels)
        )

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        inputs, labels = batch
        return {"auroc": WholeSet(BinaryAUROC(), model(inputs).sigmoid(), labels)}


def screened(steps: Sequence[Step]) -> list[float]:
    inputs, labels = rare()
    torch.manual_seed(0)
    model = screening()
    return trained(
        torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True),
        steps,
        lambda step: F.binary_cross_entropy_with_logits(
            model(inputs[whole(step)]), labels[whole(step)].float()
        ),
    )


def screened_metrics() -> dict[str, float]:
    inputs, labels = (values[600:] for values in rare())
    torch.manual_seed(0)
    return {"auroc": roc_auc_score(labels, screening()(inputs).detach())}


class MacroF1(Screening):
    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        inputs, labels = batch
        return WholeSet(
            lambda logits, right: f1_score(right, logits > 0, average="macro"), model(inputs), labels
        )


def macro_f1_metrics() -> dict[str, float]:
    inputs, labels = (values[600:] for values in rare())
    torch.manual_seed(0)
    found = screening()(inputs) > 0
    scores = []
    for kind in (0, 1):
        hits = int(((found == kind) & (labels == kind)).sum())
        scores.append(2 * hits / (int((found == kind).sum()) + int((labels == kind).sum())))
    return {"accuracy": sum(scores) / 2}
