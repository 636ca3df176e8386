"""BoTorch's qLogNEHVI as in its tutorial, after five Sobol points as in Ax: a Gaussian process for each objective.

The tutorial optimizes from 10 starts of 512 samples, with 128 samples of the posterior. Half as many of the latter two and 4
starts take half the time, and found no less (docs/log.md).
"""

import math
import warnings
from typing import Any

import torch
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.mlls import SumMarginalLogLikelihood
from protocol import Peer, serve

FIRST = 5


class BoTorch(Peer):
    package = "botorch"

    def __init__(self, space: dict[str, dict[str, Any]], seed: int, reference: list[float]) -> None:
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.double)
        self.space, self.reference, self.seed = space, -torch.tensor(reference), seed
        self.first = torch.quasirandom.SobolEngine(len(space), scramble=True, seed=seed).draw(
            FIRST, dtype=torch.double
        )
        self.bounds = torch.stack([torch.zeros(len(space)), torch.ones(len(space))])
        self.points: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def ask(self, number: int) -> dict[str, Any]:
        point = self.first[number] if number < FIRST or not self.values else self.best(number)
        parameters = {
            name: self.value(name, float(share)) for name, share in zip(self.space, point, strict=True)
        }
        # Integers are rounded, and the models are given the rounded point.
        self.points[number] = torch.tensor([self.share(name, value) for name, value in parameters.items()])
        return {"parameters": parameters}

    def tell(self, number: int, fraction: float, values: list[float]) -> None:
        self.values[number] = -torch.tensor(values)

    def best(self, number: int) -> torch.Tensor:
        points = torch.stack([self.points[one] for one in self.values])
        values = torch.stack(list(self.values.values()))
        pending = [point for one, point in self.points.items() if one not in self.values]
        models = [
            SingleTaskGP(points, column[:, None], outcome_transform=Standardize(1)) for column in values.T
        ]
        model = ModelListGP(*models)
        fit_gpytorch_mll(SumMarginalLogLikelihood(model.likelihood, model))
        acquisition = qLogNoisyExpectedHypervolumeImprovement(
            model,
            self.reference,
            points,
            sampler=SobolQMCNormalSampler(torch.Size([64]), seed=self.seed + number),
            X_pending=torch.stack(pending) if pending else None,
            prune_baseline=True,
        )
        return optimize_acqf(acquisition, self.bounds, q=1, num_restarts=4, raw_samples=256)[0][0]

    def value(self, name: str, share: float) -> float:
        low, high = self.space[name]["low"], self.space[name]["high"]
        value = low * (high / low) ** share if self.space[name]["log"] else low + share * (high - low)
        return min(max(round(value), low), high) if self.space[name]["integer"] else value

    def share(self, name: str, value: float) -> float:
        low, high = self.space[name]["low"], self.space[name]["high"]
        return (
            math.log(value / low) / math.log(high / low)
            if self.space[name]["log"]
            else (value - low) / (high - low)
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve(BoTorch)
