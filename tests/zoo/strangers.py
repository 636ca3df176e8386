"""Small trainings as people write them, by somebody who knew the documentation alone: half of them right, half subtly wrong.

CASES lists them. A twin trains plain torch, on whole steps, as the author meant it: at the constant rate RATE (study: rule constant,
schedule constant, warmup 0). It is given one array of sample indices per optimizer step. For a 'task' it returns each step's mean
loss before its update, for a 'loop' the final weights of all models as one flat tensor (the order of `flat`).
"""

# ruff: noqa: B905, C408, E501
import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bsearch import Data, Loop, Loss, Score, Task
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, TensorDataset

RATE, DECAY, BETAS, EPS = 0.02, 0.05, (0.9, 0.999), 1e-8
N, VALID, FEATURES, CLASSES = 120, 40, 6, 4


@dataclass
class Case:
    name: str
    reference: str  # task of a study.yaml in this folder
    kind: str  # 'task' or 'loop'
    expects: str  # 'exact' or 'refused' (refused, or at least named)
    why: str
    twin: Callable[[list], Any] | None = None
    space: dict = field(default_factory=dict)  # more keys of `space`


# -- shared --------------------------------------------------------------------------------------------------------------


def seeded(build, seed=7):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def blobs(n=N + VALID, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    centres = torch.randn(CLASSES, FEATURES, generator=g, dtype=torch.float64)
    return centres[y] + 0.7 * torch.randn(n, FEATURES, generator=g, dtype=torch.float64), y


X, Y = blobs()
INDEX = torch.arange(N + VALID)


def plain_data(**options):
    return Data(TensorDataset(X[:N], Y[:N]), TensorDataset(X[N:], Y[N:]), **options)


def indexed_data(*more, **options):
    tensors = (INDEX, X, Y, *more)
    return Data(TensorDataset(*(t[:N] for t in tensors)), TensorDataset(*(t[N:] for t in tensors)), **options)


def mlp(width=16, out=CLASSES):
    return seeded(
        lambda: nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, out)).double()
    )


def flat(*models):
    return torch.cat([p.detach().flatten() for m in models for p in m.parameters()])


def fit(model, optimizer, loss, steps, after=None, before=None):
    """Whole steps in plain torch; `loss(indices)` is the step's mean loss."""
    losses = []
    for indices in steps:
        if before:
            before()
        optimizer.zero_grad()
        value = loss(torch.as_tensor(np.asarray(indices)))
        value.backward()
        optimizer.step()
        with torch.no_grad():
            if after:
                after()
        losses.append(float(value.detach()))
    return losses


def fractions(steps):
    """Of the budget, at the middle of each step."""
    total, seen, out = sum(map(len, steps)), 0, []
    for s in steps:
        out.append((seen + len(s) / 2) / total)
        seen += len(s)
    return out


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


class Classifier(Task):
    """Batches of (x, y), SGD with momentum."""

    def data(self, setup):
        return plain_data()

    def model(self, setup):
        return mlp()

    def optimizer(self, model, setup):
        return torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9)


class IndexedClassifier(Classifier):
    """Batches of (index, x, y)."""

    def data(self, setup):
        return indexed_data()

    def score(self, model, batch, setup):
        _, x, y = batch[:3]
        return {"accuracy": Score((model(x).argmax(-1) == y).sum(), len(y))}


CASES: list[Case] = []


def case(name, reference, kind, expects, why, twin=None, **space):
    CASES.append(Case(name, f"zoo.strangers:{reference.__name__}", kind, expects, why, twin, space))


# == right ===============================================================================================================

# -- 1 layer decay on a tied language model

VOCAB, LENGTH = 12, 9
_g = torch.Generator().manual_seed(3)
TEXTS = 1 + torch.cumsum(torch.randint(1, 4, (N + VALID, LENGTH), generator=_g), 1) % (VOCAB - 1)
TEXTS[torch.arange(LENGTH) >= torch.randint(4, LENGTH + 1, (N + VALID, 1), generator=_g)] = 0


class TiedLM(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width, padding_idx=0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(3)
        )
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        h = self.embedding(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def layer_decay_groups(model, rate, decay, factor=0.7):
    depth = len(model.blocks)
    groups = [{"params": [model.embedding.weight], "lr": rate * factor**depth, "weight_decay": 0.0}]
    for i, block in enumerate(model.blocks):
        for matrices in (True, False):
            groups.append(
                {
                    "params": [p for p in block.parameters() if (p.ndim > 1) == matrices],
                    "lr": rate * factor ** (depth - 1 - i),
                    "weight_decay": decay if matrices else 0.0,
                }
            )
    return groups


class LayerDecayTied(Task):
    """BEiT-style layer-wise rate decay in AdamW groups, no decay of biases and norms, embedding tied to the head, padded tokens."""

    def data(self, setup):
        return Data(TensorDataset(TEXTS[:N]), TensorDataset(TEXTS[N:]))

    def model(self, setup):
        return seeded(lambda: TiedLM().double())

    def optimizer(self, model, setup):
        groups = layer_decay_groups(model, setup.learning_rate, setup.weight_decay)
        return torch.optim.AdamW(groups, lr=setup.learning_rate, betas=setup.betas, eps=setup.eps)

    def loss(self, model, batch, setup):
        (t,) = batch
        total = F.cross_entropy(model(t[:, :-1]).transpose(1, 2), t[:, 1:], ignore_index=0, reduction="sum")
        return Loss(total, (t[:, 1:] != 0).sum())

    def score(self, model, batch, setup):
        (t,) = batch
        counted = t[:, 1:] != 0
        return {"accuracy": Score(((model(t[:, :-1]).argmax(-1) == t[:, 1:]) & counted).sum(), counted.sum())}


def twin_layer_decay(steps):
    model = seeded(lambda: TiedLM().double())
    optimizer = torch.optim.AdamW(layer_decay_groups(model, RATE, DECAY), lr=RATE, betas=BETAS, eps=EPS)

    def loss(i):
        t = TEXTS[i]
        return F.cross_entropy(model(t[:, :-1]).transpose(1, 2), t[:, 1:], ignore_index=0)

    return fit(model, optimizer, loss, steps)


case(
    "layer_decay_tied",
    LayerDecayTied,
    "task",
    "exact",
    "summed token loss, one count; groups hold fixed fractions of the rate and the tied weight once",
    twin_layer_decay,
    weight_decay=DECAY,
)

# -- 2 schedule-free


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Defazio et al. 2024, as in facebookresearch/schedule_free: counters of its own in the groups, a mode that has to be train."""

    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0):
        super().__init__(
            params,
            dict(
                lr=lr,
                momentum=momentum,
                weight_decay=weight_decay,
                k=0,
                weight_sum=0.0,
                lr_max=-1.0,
                train_mode=False,
            ),
        )

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["momentum"])
                group["train_mode"] = True

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / group["momentum"])
                group["train_mode"] = False

    @torch.no_grad()
    def step(self, closure=None):
        if not self.param_groups[0]["train_mode"]:
            raise Exception("Optimizer was not in train mode when step is called.")
        for group in self.param_groups:
            rate = group["lr"]
            group["lr_max"] = max(rate, group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            try:
                share = weight / group["weight_sum"]
            except ZeroDivisionError:
                share = 0.0
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                grad = p.grad.add(p, alpha=group["weight_decay"])
                p.lerp_(state["z"], share)
                p.add_(grad, alpha=rate * (group["momentum"] * (1 - share) - 1))
                state["z"].sub_(grad, alpha=rate)
            group["k"] += 1


class ScheduleFree(Classifier):
    """Schedule-free SGD: k, weight_sum and lr_max are counters in the group; scores are of the training point y."""

    def optimizer(self, model, setup):
        optimizer = ScheduleFreeSGD(model.parameters(), lr=setup.learning_rate)
        optimizer.train()
        return optimizer


def twin_schedule_free(steps):
    model = mlp()
    optimizer = ScheduleFreeSGD(model.parameters(), lr=RATE)
    optimizer.train()
    return fit(model, optimizer, lambda i: F.cross_entropy(model(X[i]), Y[i]), steps)


case(
    "schedule_free",
    ScheduleFree,
    "task",
    "exact",
    "steps see only the summed gradient; its counters are in param_groups, so in its state_dict",
    twin_schedule_free,
)

# -- 3 mean teacher


class StudentTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        return self.student(x)

    @torch.no_grad()
    def move(self, decay=0.9):
        for t, s in zip(self.teacher.parameters(), self.student.parameters()):
            t.lerp_(s, 1 - decay)


class MeanTeacher(Classifier):
    """Mean teacher inside the model, moved once a step in after_step; consistency between two views, per sample."""

    def model(self, setup):
        return StudentTeacher()

    def optimizer(self, model, setup):
        return torch.optim.SGD(model.student.parameters(), lr=setup.learning_rate, momentum=0.9)

    def loss(self, model, batch, setup):
        x, y = batch
        with torch.no_grad():
            target = model.teacher(x).softmax(-1)
        consistency = (model.student(1.1 * x).softmax(-1) - target).square().sum()
        return Loss(F.cross_entropy(model.student(x), y, reduction="sum") + 5 * consistency, len(y))

    def after_step(self, model, setup):
        model.move()


def twin_mean_teacher(steps):
    model = StudentTeacher()

    def loss(i):
        target = model.teacher(X[i]).softmax(-1).detach()
        return (
            F.cross_entropy(model.student(X[i]), Y[i])
            + 5 * (model.student(1.1 * X[i]).softmax(-1) - target).square().sum(1).mean()
        )

    return fit(model, sgd(model.student.parameters()), loss, steps, after=model.move)


case(
    "mean_teacher",
    MeanTeacher,
    "task",
    "exact",
    "the teacher is in the model, frozen, and moves once a step",
    twin_mean_teacher,
)

# -- 4 gradual unfreezing


def unfreezing_net():
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)
        ).double()
    )


def unfreeze(net, fraction):
    net[0].requires_grad_(fraction >= 0.6)
    net[2].requires_grad_(fraction >= 0.3)


def gradual_unfreezing(setup):
    """ULMFiT: the head first, the layers below from 30 % and 60 % of the budget on; one SGD holds all of them."""
    net = unfreezing_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=setup.learning_rate, momentum=0.9, weight_decay=1e-3)
    loop = Loop(setup, plain_data(), models={"net": net}, optimizers={"net": optimizer})
    for step in loop:
        unfreeze(net, step.fraction)
        for part in step:
            x, y = part.batch
            (part.weight * F.cross_entropy(net(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.evaluates:
            with torch.no_grad():
                yield loop.measure(accuracy=(net(X[N:]).argmax(-1) == Y[N:]).double().mean())


def twin_unfreezing(steps):
    net = unfreezing_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-3)
    where = iter(fractions(steps))
    fit(
        net,
        optimizer,
        lambda i: F.cross_entropy(net(X[i]), Y[i]),
        steps,
        before=lambda: unfreeze(net, next(where)),
    )
    return flat(net)


case(
    "gradual_unfreezing",
    gradual_unfreezing,
    "loop",
    "exact",
    "what is frozen follows step.fraction alone; frozen parameters have no gradient and are skipped",
    twin_unfreezing,
)

# -- 5 Muon and Adam in one optimizer


class MuonWithAdam(torch.optim.Optimizer):
    """Matrices by Newton-Schulz, the rest by Adam: groups with options of their own (use_muon, ns_steps)."""

    def __init__(self, groups, lr):
        for group in groups:
            group.setdefault("lr", lr)
        super().__init__(
            groups, dict(lr=lr, momentum=0.95, ns_steps=5, betas=BETAS, eps=1e-10, use_muon=False)
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if group["use_muon"]:
                    m = s.setdefault("momentum_buffer", torch.zeros_like(p))
                    m.lerp_(p.grad, 1 - group["momentum"])
                    u = p.grad.lerp(m, group["momentum"])
                    u = u / (u.norm() + 1e-7)
                    for _ in range(group["ns_steps"]):
                        a = u @ u.T
                        u = 3.4445 * u + (-4.7750 * a + 2.0315 * a @ a) @ u
                    p.add_(u, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)
                else:
                    s["step"] = s.get("step", 0) + 1
                    m = s.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 1 - group["betas"][0])
                    v = s.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(
                        p.grad.square(), 1 - group["betas"][1]
                    )
                    corrected = m / (1 - group["betas"][0] ** s["step"])
                    scale = (v / (1 - group["betas"][1] ** s["step"])).sqrt() + group["eps"]
                    p.addcdiv_(corrected, scale, value=-group["lr"])


def muon_groups(model, rate):
    return [
        {"params": [p for p in model.parameters() if p.ndim == 2], "use_muon": True, "lr": rate},
        {"params": [p for p in model.parameters() if p.ndim != 2], "use_muon": False, "lr": 0.1 * rate},
    ]


class MuonGroups(Classifier):
    """Muon for matrices and Adam for biases in one optimizer, as in KellerJordan/Muon: the groups have different options."""

    def optimizer(self, model, setup):
        return MuonWithAdam(muon_groups(model, setup.learning_rate), lr=setup.learning_rate)


def twin_muon(steps):
    model = mlp()
    return fit(
        model,
        MuonWithAdam(muon_groups(model, RATE), RATE),
        lambda i: F.cross_entropy(model(X[i]), Y[i]),
        steps,
    )


case(
    "muon_groups",
    MuonGroups,
    "task",
    "exact",
    "non-linear in the gradient, but computed once from the whole step's sum",
    twin_muon,
)

# -- 6 linear gradient hooks

TOKENS = torch.randint(0, 10, (N + VALID, 5), generator=torch.Generator().manual_seed(5))
BAG_LABELS = (TOKENS.sum(1) % CLASSES).long()


class BagModel(nn.Module):
    """Rows 0 to 4 of the embedding are pretrained and keep their values: a hook zeroes their gradient; the head learns slower."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.double()
        mask = torch.ones(10, 1, dtype=torch.float64)
        mask[:5] = 0
        self.embedding.weight.register_hook(lambda g: g * mask)
        self.head[2].weight.register_hook(lambda g: 0.1 * g)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).mean(1))


class LinearHooks(Classifier):
    """register_hook on parameters: a mask that freezes half of an embedding, and a tenth of the gradient for the last layer."""

    def data(self, setup):
        return Data(TensorDataset(TOKENS[:N], BAG_LABELS[:N]), TensorDataset(TOKENS[N:], BAG_LABELS[N:]))

    def model(self, setup):
        return seeded(BagModel)


def twin_linear_hooks(steps):
    model = seeded(BagModel)
    return fit(
        model, sgd(model.parameters()), lambda i: F.cross_entropy(model(TOKENS[i]), BAG_LABELS[i]), steps
    )


case(
    "linear_hooks",
    LinearHooks,
    "task",
    "exact",
    "masking and scaling a gradient are linear, so parts still add up; a copy of the model must keep the hooks",
    twin_linear_hooks,
)

# -- 7 clipping per module in a pre-step hook


def clip_modules_before(optimizer, model, limit=0.05):
    def clip(opt, args, kwargs):
        for module in model:
            parameters = list(module.parameters())
            if parameters:
                nn.utils.clip_grad_norm_(parameters, limit)

    optimizer.register_step_pre_hook(clip)
    return optimizer


class ClipInPreHook(Classifier):
    """Clips each layer's gradient in optimizer.register_step_pre_hook: once a step, on the accumulated gradient."""

    def optimizer(self, model, setup):
        return clip_modules_before(
            torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9), model
        )


def twin_clip_pre_hook(steps):
    model = mlp()
    optimizer = clip_modules_before(sgd(model.parameters()), model)
    return fit(model, optimizer, lambda i: F.cross_entropy(model(X[i]), Y[i]), steps)


case(
    "clip_in_pre_hook",
    ClipInPreHook,
    "task",
    "exact",
    "non-linear, but the hook runs once, on the whole step's gradient",
    twin_clip_pre_hook,
)

# -- 8 a warm-up counted in a buffer by after_step


class SparseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.double()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        return self.head(self.body(x).tanh())

    def weight(self):
        return 0.2 * min(1.0, int(self.steps) / 6)


class WarmupInBuffer(Classifier):
    """Sparsity warm-up (as KL annealing): its weight follows a step counter, a buffer of the model that after_step increments."""

    def model(self, setup):
        return seeded(SparseNet)

    def loss(self, model, batch, setup):
        x, y = batch
        hidden = model.body(x).tanh()
        return Loss(
            F.cross_entropy(model.head(hidden), y, reduction="sum") + model.weight() * hidden.abs().sum(),
            len(y),
        )

    def after_step(self, model, setup):
        model.steps += 1


def twin_warmup_buffer(steps):
    model = seeded(SparseNet)

    def loss(i):
        hidden = model.body(X[i]).tanh()
        return F.cross_entropy(model.head(hidden), Y[i]) + model.weight() * hidden.abs().sum(1).mean()

    return fit(model, sgd(model.parameters()), loss, steps, after=lambda: model.steps.add_(1))


case(
    "warmup_in_buffer",
    WarmupInBuffer,
    "task",
    "exact",
    "the counter moves once a step and is in the model, so checkpoints have it",
    twin_warmup_buffer,
)

# -- 9 features of a frozen backbone, cached


class ProbeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh()
        ).requires_grad_(False)
        self.head = nn.Linear(16, CLASSES)
        self.double()

    def forward(self, x):
        return self.head(self.backbone(x))


class CachedFeatures(IndexedClassifier):
    """Linear probe: features of a frozen backbone are computed at a sample's first use and kept in a dict of the task, by index."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def model(self, setup):
        self.cache = {}
        return seeded(ProbeNet)

    def loss(self, model, batch, setup):
        index, x, y = batch
        new = [j for j, i in enumerate(index.tolist()) if i not in self.cache]
        if new:
            with torch.no_grad():
                for j, row in zip(new, model.backbone(x[new])):
                    self.cache[int(index[j])] = row
        features = torch.stack([self.cache[i] for i in index.tolist()])
        return Loss(F.cross_entropy(model.head(features), y, reduction="sum"), len(y))


def twin_cached(steps):
    model = seeded(ProbeNet)
    return fit(model, sgd(model.head.parameters()), lambda i: F.cross_entropy(model(X[i]), Y[i]), steps)


case(
    "cached_features",
    CachedFeatures,
    "task",
    "exact",
    "a cache of a frozen function's values changes nothing, unless the examination fills it at other weights and leaves it so",
    twin_cached,
)

# -- 10 early-learning regularisation, targets per sample in a buffer


class ELRNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("targets", torch.full((N, CLASSES), 1.0 / CLASSES, dtype=torch.float64))

    def forward(self, x):
        return self.net(x)

    def terms(self, index, x, y):
        logits = self.net(x)
        p = logits.softmax(-1).clamp(1e-4, 1 - 1e-4)
        with torch.no_grad():
            self.targets[index] = 0.7 * self.targets[index] + 0.3 * p / p.sum(-1, keepdim=True)
        regular = (1 - (self.targets[index] * p).sum(-1)).log()
        return F.cross_entropy(logits, y, reduction="none") + 3 * regular


class ELRBuffer(IndexedClassifier):
    """Early-learning regularisation (Liu et al. 2020): the loss updates a moving target for each sample, rows of a buffer of the model."""

    def model(self, setup):
        return seeded(ELRNet)

    def loss(self, model, batch, setup):
        return Loss(model.terms(*batch).sum(), len(batch[0]))


def twin_elr(steps):
    model = seeded(ELRNet)
    return fit(model, sgd(model.parameters()), lambda i: model.terms(i, X[i], Y[i]).mean(), steps)


case(
    "elr_buffer",
    ELRBuffer,
    "task",
    "exact",
    "a row moves only with its own sample, so any split is the same, and it is in checkpoints; a report is fine, a refusal is not",
    twin_elr,
)

# -- 11 MoCo with a queue


class MoCoNet(nn.Module):
    def __init__(self, keys=128):
        super().__init__()
        self.query = mlp(out=8)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(keys, 8, dtype=torch.float64), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.pending = None

    def forward(self, x):
        return F.normalize(self.query(x), dim=1)

    def info_nce(self, q, k):
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.T], 1) / 0.2
        self.pending = k.detach()
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))

    @torch.no_grad()
    def move(self):
        for k, q in zip(self.key.parameters(), self.query.parameters()):
            k.lerp_(q, 0.1)
        keys, self.pending = self.pending, None
        if keys is not None:
            self.queue[(self.pointer + torch.arange(len(keys))) % len(self.queue)] = keys
            self.pointer.copy_((self.pointer + len(keys)) % len(self.queue))


VIEW_A, VIEW_B = X + 0.05 * X.roll(1, 1), X - 0.05 * X.roll(1, 1)


class MoCoQueue(Task):
    """MoCo: momentum encoder and queue are in the model; embed gives queries and keys, batch_loss compares, after_step enqueues the step's keys."""

    def data(self, setup):
        return Data(TensorDataset(VIEW_A[:N], VIEW_B[:N]), TensorDataset(VIEW_A[N:], VIEW_B[N:]))

    def model(self, setup):
        return seeded(MoCoNet)

    def optimizer(self, model, setup):
        return torch.optim.SGD(model.query.parameters(), lr=setup.learning_rate, momentum=0.9)

    def embed(self, model, batch, setup):
        a, b = batch
        with torch.no_grad():
            keys = F.normalize(model.key(b), dim=1)
        return model(a), keys

    def batch_loss(self, model, embeddings, setup):
        return model.info_nce(*embeddings)

    def after_step(self, model, setup):
        model.move()

    def score(self, model, batch, setup):
        a, b = batch
        return {"accuracy": Score((model(a) * model(b)).sum(), len(a))}


def twin_moco(steps):
    model = seeded(MoCoNet)

    def loss(i):
        with torch.no_grad():
            keys = F.normalize(model.key(VIEW_B[i]), dim=1)
        return model.info_nce(model(VIEW_A[i]), keys)

    return fit(model, sgd(model.query.parameters()), loss, steps, after=model.move)


case(
    "moco_queue",
    MoCoQueue,
    "task",
    "exact",
    "the loss is given as embed and batch_loss, keys without gradient travel along, the queue moves once a step",
    twin_moco,
)

# -- 12 PPO on stored rollouts, a stream


def rollouts(n=N + VALID):
    g = torch.Generator().manual_seed(11)
    obs = torch.randn(n, FEATURES, generator=g, dtype=torch.float64)
    action = torch.randint(0, CLASSES, (n,), generator=g)
    logp = torch.full((n,), -math.log(CLASSES), dtype=torch.float64)
    returns = (action == obs[:, :CLASSES].argmax(1)).double() + 0.1 * torch.randn(
        n, generator=g, dtype=torch.float64
    )
    advantage = returns - returns[:N].mean()
    return obs, action, logp, advantage / advantage[:N].std(), returns


ROLLOUTS = rollouts()


class RolloutStream(IterableDataset):
    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for i in torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist():
            yield tuple(t[i] for t in ROLLOUTS)


def ppo_terms(model, obs, action, old, advantage, returns):
    out = model(obs)
    log_p = out[:, :CLASSES].log_softmax(-1)
    ratio = (log_p.gather(1, action[:, None]).squeeze(1) - old).exp()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return policy + 0.5 * (out[:, CLASSES] - returns).square() - 0.01 * entropy


class OfflinePPOStream(Task):
    """PPO's clipped update over stored rollouts: a stream that shuffles itself by set_epoch; advantages are normalised once over the rollout."""

    def data(self, setup):
        return Data(RolloutStream(), TensorDataset(*(t[N:] for t in ROLLOUTS)), samples=N)

    def model(self, setup):
        return mlp(out=CLASSES + 1)

    def optimizer(self, model, setup):
        return torch.optim.Adam(model.parameters(), lr=setup.learning_rate, betas=setup.betas, eps=setup.eps)

    def loss(self, model, batch, setup):
        return Loss(ppo_terms(model, *batch).sum(), len(batch[0]))

    def score(self, model, batch, setup):
        obs, *_ = batch
        right = model(obs)[:, :CLASSES].argmax(1) == obs[:, :CLASSES].argmax(1)
        return {"accuracy": Score(right.sum(), len(obs))}


def twin_ppo(steps):
    model = mlp(out=CLASSES + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=BETAS, eps=EPS)
    return fit(model, optimizer, lambda i: ppo_terms(model, *(t[i] for t in ROLLOUTS)).mean(), steps)


case(
    "ppo_offline_stream",
    OfflinePPOStream,
    "task",
    "exact",
    "sums over samples; nothing is normalised per batch, and the stream has set_epoch (indices are positions in ROLLOUTS)",
    twin_ppo,
)

# -- 13 GAN with R1, two rates

LATENTS = torch.randn(N, 3, generator=torch.Generator().manual_seed(13), dtype=torch.float64)


def gan():
    g = seeded(lambda: nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, FEATURES)).double(), 1)
    d = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 16), nn.Softplus(), nn.Linear(16, 1)).double(), 2)
    return g, d


def d_loss(g, d, real, z):
    real = real.clone().requires_grad_()
    out = d(real)
    (slope,) = torch.autograd.grad(out.sum(), real, create_graph=True)
    penalty = slope.square().sum(1).mean()
    return F.softplus(-out).mean() + F.softplus(d(g(z).detach())).mean() + 0.5 * penalty


def gan_r1(setup):
    """GAN with R1 penalty (double backward), two rates; d's gradients are left dirty by g's pass and cleared at the next step's begin."""
    g, d = gan()
    og = torch.optim.Adam(g.parameters(), lr=0.5 * setup.learning_rate, betas=(0.0, 0.99))
    od = torch.optim.Adam(d.parameters(), lr=setup.learning_rate, betas=(0.0, 0.99))
    data = Data(TensorDataset(X[:N], LATENTS), TensorDataset(X[N:]))
    loop = Loop(setup, data, models={"g": g, "d": d}, optimizers={"g": og, "d": od})
    for step in loop:
        od.zero_grad()
        for part in step:
            real, z = part.batch
            (part.weight * d_loss(g, d, real, z)).backward()
        od.step()
        og.zero_grad()
        for part in step:
            _, z = part.batch
            (part.weight * F.softplus(-d(g(z))).mean()).backward()
        og.step()
        if step.evaluates:
            with torch.no_grad():
                yield loop.measure(accuracy=-(g(LATENTS).mean(0) - X[N:].mean(0)).norm())


def twin_gan(steps):
    g, d = gan()
    og = torch.optim.Adam(g.parameters(), lr=0.5 * RATE, betas=(0.0, 0.99))
    od = torch.optim.Adam(d.parameters(), lr=RATE, betas=(0.0, 0.99))
    for i in map(torch.as_tensor, steps):
        od.zero_grad()
        d_loss(g, d, X[i], LATENTS[i]).backward()
        od.step()
        og.zero_grad()
        F.softplus(-d(g(LATENTS[i]))).mean().backward()
        og.step()
    return flat(g, d)


case(
    "gan_r1",
    gan_r1,
    "loop",
    "exact",
    "means weighted by part.weight in both passes; dirty gradients of d are cleared before they matter",
    twin_gan,
)

# -- 14 weight decay and teacher momentum by schedules


def wd_schedule(setup):
    """DINO's habits: weight decay rises along training (group option set in each step), a teacher whose momentum rises, zero_grad first."""
    model = StudentTeacher()
    student, teacher = model.student, model.teacher
    optimizer = torch.optim.AdamW(
        student.parameters(),
        lr=setup.learning_rate,
        betas=setup.betas,
        eps=setup.eps,
        weight_decay=setup.weight_decay,
    )
    loop = Loop(
        setup,
        plain_data(),
        models={"student": student, "teacher": teacher},
        optimizers={"student": optimizer},
    )
    for step in loop:
        for group in optimizer.param_groups:
            group["weight_decay"] = setup.weight_decay * (1 + step.fraction)
        optimizer.zero_grad(set_to_none=False)
        for part in step:
            x, y = part.batch
            with torch.no_grad():
                target = teacher(x).softmax(-1)
            out = student(1.1 * x)
            loss = F.cross_entropy(out, y, reduction="sum") + F.cross_entropy(out, target, reduction="sum")
            (loss / step.samples).backward()
        optimizer.step()
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters()):
                t.lerp_(s, 0.3 * (1 - step.fraction))
        if step.evaluates:
            with torch.no_grad():
                yield loop.measure(accuracy=(teacher(X[N:]).argmax(-1) == Y[N:]).double().mean())


def twin_wd(steps):
    model = StudentTeacher()
    student, teacher = model.student, model.teacher
    optimizer = torch.optim.AdamW(student.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for i, fraction in zip(map(torch.as_tensor, steps), fractions(steps)):
        optimizer.param_groups[0]["weight_decay"] = DECAY * (1 + fraction)
        optimizer.zero_grad()
        target = teacher(X[i]).softmax(-1).detach()
        out = student(1.1 * X[i])
        (F.cross_entropy(out, Y[i]) + F.cross_entropy(out, target)).backward()
        optimizer.step()
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters()):
                t.lerp_(s, 0.3 * (1 - fraction))
    return flat(student, teacher)


case(
    "wd_schedule",
    wd_schedule,
    "loop",
    "exact",
    "both schedules follow step.fraction, sums are divided by step.samples, the teacher moves once a step",
    twin_wd,
    weight_decay=DECAY,
)

# -- 15 two optimizers after one pass, own clipping


def two_optimizers(setup):
    """Wide and deep: SGD for the wide part, AdamW for the deep one, after one backward pass; both clipped together, once a step."""
    wide = seeded(lambda: nn.Linear(FEATURES, CLASSES).double(), 3)
    deep = mlp()
    optimizers = {
        "wide": torch.optim.SGD(wide.parameters(), lr=setup.learning_rate),
        "deep": torch.optim.AdamW(
            deep.parameters(),
            lr=0.2 * setup.learning_rate,
            betas=setup.betas,
            eps=setup.eps,
            weight_decay=0.0,
        ),
    }
    loop = Loop(setup, plain_data(), models={"wide": wide, "deep": deep}, optimizers=optimizers)
    for step in loop:
        for part in step:
            x, y = part.batch
            (part.weight * F.cross_entropy(wide(x) + deep(x), y)).backward()
        nn.utils.clip_grad_norm_([*wide.parameters(), *deep.parameters()], 0.5)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        if step.evaluates:
            with torch.no_grad():
                yield loop.measure(accuracy=((wide(X[N:]) + deep(X[N:])).argmax(-1) == Y[N:]).double().mean())


def twin_two(steps):
    wide, deep = seeded(lambda: nn.Linear(FEATURES, CLASSES).double(), 3), mlp()
    optimizers = [
        torch.optim.SGD(wide.parameters(), lr=RATE),
        torch.optim.AdamW(deep.parameters(), lr=0.2 * RATE, betas=BETAS, eps=EPS, weight_decay=0.0),
    ]
    for i in map(torch.as_tensor, steps):
        F.cross_entropy(wide(X[i]) + deep(X[i]), Y[i]).backward()
        nn.utils.clip_grad_norm_([*wide.parameters(), *deep.parameters()], 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return flat(wide, deep)


case(
    "two_optimizers",
    two_optimizers,
    "loop",
    "exact",
    "one pass serves both optimizers; clipping comes once, after the last part (on one device)",
    twin_two,
)

# -- 16 a score that leaves the model in eval mode


class InferenceScaled(nn.Module):
    """Dropout's old weight-scaling rule without the noise: training and evaluation differ, deterministically."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x) * (2.0 if self.training else 1.0)


class ScoreLeavesEval(Classifier):
    """score calls model.eval() and nobody calls model.train(): in a plain loop a bug, here the study's loop has to own the mode."""

    def model(self, setup):
        return InferenceScaled()

    def score(self, model, batch, setup):
        model.eval()
        x, y = batch
        out = model(x)
        return {
            "accuracy": Score((out.argmax(-1) == y).sum(), len(y)),
            "val_loss": Score(F.cross_entropy(out, y, reduction="sum"), len(y)),
        }


def twin_score_eval(steps):
    model = InferenceScaled()
    return fit(model, sgd(model.parameters()), lambda i: F.cross_entropy(model(X[i]), Y[i]), steps)


case(
    "score_leaves_eval",
    ScoreLeavesEval,
    "task",
    "exact",
    "evaluation is in eval mode anyway; every step has to train in train mode",
    twin_score_eval,
)

# -- 17 mixture of experts, z-loss, checkpointed experts


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(FEATURES, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)) for _ in range(3)
        )
        self.double()

    def forward(self, x):
        logits = self.router(x)
        gate, chosen = logits.softmax(-1).max(-1)
        out = x.new_zeros(len(x), CLASSES)
        for e, expert in enumerate(self.experts):
            rows = (chosen == e).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(
                    0, rows, checkpoint(expert, x[rows], use_reentrant=False) * gate[rows, None]
                )
        return out, logits, chosen


class MoEZLoss(Classifier):
    """Top-1 mixture of experts with the router's z-loss, a sum over samples; experts are checkpointed and may get no sample."""

    def model(self, setup):
        return seeded(MoE)

    def loss(self, model, batch, setup):
        x, y = batch
        out, logits, _ = model(x)
        return Loss(
            F.cross_entropy(out, y, reduction="sum") + 0.1 * logits.logsumexp(-1).square().sum(), len(y)
        )

    def score(self, model, batch, setup):
        x, y = batch
        return {"accuracy": Score((model(x)[0].argmax(-1) == y).sum(), len(y))}


def twin_moe(steps):
    model = seeded(MoE)

    def loss(i):
        out, logits, _ = model(X[i])
        return F.cross_entropy(out, Y[i]) + 0.1 * logits.logsumexp(-1).square().mean()

    return fit(model, sgd(model.parameters()), loss, steps)


case(
    "moe_z_loss",
    MoEZLoss,
    "task",
    "exact",
    "per-sample auxiliary term; an expert without samples in a micro-batch simply has no gradient from it",
    twin_moe,
)

# -- 18 label noise per index, weighted draws


class NoisyLabels(Dataset):
    """A fifth of the labels are wrong, fixed by the index (its own generator, seeded with it); inputs jitter by torch's generator."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(1000 + int(i))
        label = Y[i]
        if torch.rand((), generator=g) < 0.2:
            label = torch.randint(0, CLASSES, (), generator=g)
        return X[i] + 0.05 * torch.randn(FEATURES, dtype=torch.float64), label


class LabelNoiseWeighted(Classifier):
    """Label noise that is a function of the index, augmentation by torch's global generator, samples drawn by weights."""

    def data(self, setup):
        return Data(NoisyLabels(), TensorDataset(X[N:], Y[N:]), weights=(1.0 + (Y[:N] == 0)).tolist())


case(
    "label_noise_weighted",
    LabelNoiseWeighted,
    "task",
    "exact",
    "a generator seeded anew for each index draws the same each time; the rest is seeded by the study (no twin: the jitter is the study's)",
)

# == wrong, or impossible to carry =======================================================================================

# -- 19 teacher moved per part


def teacher_in_parts(setup):
    """The teacher's moving average is updated inside the loop over micro-batches: more micro-batches, a faster teacher."""
    model = StudentTeacher()
    student, teacher = model.student, model.teacher
    optimizer = torch.optim.SGD(student.parameters(), lr=setup.learning_rate, momentum=0.9)
    loop = Loop(
        setup,
        plain_data(),
        models={"student": student, "teacher": teacher},
        optimizers={"student": optimizer},
    )
    for step in loop:
        for part in step:
            x, y = part.batch
            with torch.no_grad():
                target = teacher(x).softmax(-1)
            loss = (
                F.cross_entropy(student(x), y)
                + 5 * (student(1.1 * x).softmax(-1) - target).square().sum(1).mean()
            )
            (part.weight * loss).backward()
            model.move()
        optimizer.step()
        optimizer.zero_grad()
        if step.evaluates:
            with torch.no_grad():
                yield loop.measure(accuracy=(student(X[N:]).argmax(-1) == Y[N:]).double().mean())


def twin_teacher_parts(steps):
    model = StudentTeacher()

    def loss(i):
        target = model.teacher(X[i]).softmax(-1).detach()
        return (
            F.cross_entropy(model.student(X[i]), Y[i])
            + 5 * (model.student(1.1 * X[i]).softmax(-1) - target).square().sum(1).mean()
        )

    fit(model, sgd(model.student.parameters()), loss, steps, after=model.move)
    return flat(model.student, model.teacher)


case(
    "teacher_in_parts",
    teacher_in_parts,
    "loop",
    "refused",
    "later parts see another teacher; at the first step teacher and student are equal, so the first step alone shows nothing",
    twin_teacher_parts,
)

# -- 20 centre loss with parameters and optimizer outside of the model


class CenterLossOutside(Classifier):
    """Centre loss as in KaiyangZhou/pytorch-center-loss: centres are a parameter of the task, with an SGD of its own stepped in after_step."""

    def model(self, setup):
        self.centers = nn.Parameter(torch.zeros(CLASSES, CLASSES, dtype=torch.float64))
        self.center_optimizer = torch.optim.SGD([self.centers], lr=0.5)
        return mlp()

    def loss(self, model, batch, setup):
        x, y = batch
        out = model(x)
        return Loss(
            F.cross_entropy(out, y, reduction="sum") + 0.1 * (out - self.centers[y]).square().sum(), len(y)
        )

    def after_step(self, model, setup):
        self.center_optimizer.step()
        self.center_optimizer.zero_grad()


def twin_center(steps):
    model, centers = mlp(), nn.Parameter(torch.zeros(CLASSES, CLASSES, dtype=torch.float64))
    own = torch.optim.SGD([centers], lr=0.5)

    def loss(i):
        out = model(X[i])
        return F.cross_entropy(out, Y[i]) + 0.1 * (out - centers[Y[i]]).square().sum(1).mean()

    def after():
        own.step()
        own.zero_grad()

    return fit(model, sgd(model.parameters()), loss, steps, after=after)


case(
    "center_loss_outside",
    CenterLossOutside,
    "task",
    "refused",
    "trained parameters that are not the model's: not in checkpoints, not moved to the device, not summed over devices",
    twin_center,
)

# -- 21 learnable temperature in the optimizer, but of no module


class TemperatureOutside(Classifier):
    """A learnable log-temperature is an attribute of the task, added to the optimizer by hand: optimizer([*model.parameters(), self.t])."""

    def model(self, setup):
        self.log_temperature = nn.Parameter(torch.zeros((), dtype=torch.float64))
        return mlp()

    def optimizer(self, model, setup):
        return torch.optim.SGD(
            [*model.parameters(), self.log_temperature], lr=setup.learning_rate, momentum=0.9
        )

    def loss(self, model, batch, setup):
        x, y = batch
        return Loss(F.cross_entropy(model(x) * self.log_temperature.exp(), y, reduction="sum"), len(y))


def twin_temperature(steps):
    model, t = mlp(), nn.Parameter(torch.zeros((), dtype=torch.float64))
    return fit(
        model, sgd([*model.parameters(), t]), lambda i: F.cross_entropy(model(X[i]) * t.exp(), Y[i]), steps
    )


case(
    "temperature_outside",
    TemperatureOutside,
    "task",
    "refused",
    "exact in one run, but the temperature is not in the model: a resumed trial restores its momentum and not its value",
    twin_temperature,
)

# -- 22 ReduceLROnPlateau in a loop


def plateau(setup):
    """ReduceLROnPlateau stepped at each evaluation, handed over as state: the loop's schedule writes the rate it reads."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=setup.learning_rate, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.5)
    loop = Loop(
        setup, plain_data(), models={"net": net}, optimizers={"net": optimizer}, state={"plateau": scheduler}
    )
    for step in loop:
        for part in step:
            x, y = part.batch
            (part.weight * F.cross_entropy(net(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.evaluates:
            with torch.no_grad():
                out = net(X[N:])
                scheduler.step(F.cross_entropy(out, Y[N:]))
                yield loop.measure(accuracy=(out.argmax(-1) == Y[N:]).double().mean())


case(
    "plateau",
    plateau,
    "loop",
    "refused",
    "two owners of the rate: the study's schedule undoes (or is undone by) what the plateau does (no twin: it depends on when is evaluated)",
)

# -- 23 nanoGPT's get_lr


def nanogpt_lr(setup):
    """nanoGPT: the body sets group['lr'] in each step, by its own warm-up and cosine over step.number."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=setup.learning_rate, momentum=0.9)
    loop = Loop(setup, plain_data(), models={"net": net}, optimizers={"net": optimizer})
    for step in loop:
        rate = (
            setup.learning_rate
            * min(1, (step.number + 1) / 3)
            * (0.5 + 0.5 * math.cos(math.pi * min(1, step.number / 100)))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        for part in step:
            x, y = part.batch
            (part.weight * F.cross_entropy(net(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.evaluates:
            with torch.no_grad():
                yield loop.measure(accuracy=(net(X[N:]).argmax(-1) == Y[N:]).double().mean())


def twin_nanogpt(steps):
    net = mlp()
    optimizer = sgd(net.parameters())
    numbers = iter(range(len(steps)))

    def before():
        n = next(numbers)
        optimizer.param_groups[0]["lr"] = (
            RATE * min(1, (n + 1) / 3) * (0.5 + 0.5 * math.cos(math.pi * min(1, n / 100)))
        )

    fit(net, optimizer, lambda i: F.cross_entropy(net(X[i]), Y[i]), steps, before=before)
    return flat(net)


case(
    "nanogpt_lr",
    nanogpt_lr,
    "loop",
    "refused",
    "the body overrides the study's schedule, which every trial reports as its own; also in steps, so it depends on the batch",
    twin_nanogpt,
)

# -- 24 forgotten zero_grad


def forgot_zero_grad(setup):
    """optimizer.zero_grad() is missing: every step adds to the gradients of all steps before."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=setup.learning_rate)
    loop = Loop(setup, plain_data(), models={"net": net}, optimizers={"net": optimizer})
    for step in loop:
        for part in step:
            x, y = part.batch
            (part.weight * F.cross_entropy(net(x), y)).backward()
        optimizer.step()
        if step.evaluates:
            with torch.no_grad():
                yield loop.measure(accuracy=(net(X[N:]).argmax(-1) == Y[N:]).double().mean())


def twin_zero_grad(steps):
    net = mlp()
    fit(net, torch.optim.SGD(net.parameters(), lr=RATE), lambda i: F.cross_entropy(net(X[i]), Y[i]), steps)
    return flat(net)


case(
    "forgot_zero_grad",
    forgot_zero_grad,
    "loop",
    "refused",
    "the first step is right, all later ones are sums over steps",
    twin_zero_grad,
)

# -- 25 zero_grad inside the loop over parts


def zero_grad_in_parts(setup):
    """zero_grad, backward inside the loop over micro-batches, step after it, as left over from a loop without accumulation."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=setup.learning_rate)
    loop = Loop(setup, plain_data(), models={"net": net}, optimizers={"net": optimizer})
    for step in loop:
        for part in step:
            x, y = part.batch
            optimizer.zero_grad()
            (part.weight * F.cross_entropy(net(x), y)).backward()
        optimizer.step()
        if step.evaluates:
            with torch.no_grad():
                yield loop.measure(accuracy=(net(X[N:]).argmax(-1) == Y[N:]).double().mean())


case(
    "zero_grad_in_parts",
    zero_grad_in_parts,
    "loop",
    "refused",
    "only the last micro-batch's gradient reaches the step",
    twin_zero_grad,
)

# -- 26 eval mode left on


def eval_left_on(setup):
    """net.eval() before each evaluation and no net.train() after it: dropout is off from the first evaluation on."""
    net = seeded(
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, CLASSES)
        ).double()
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=setup.learning_rate, momentum=0.9)
    loop = Loop(setup, plain_data(), models={"net": net}, optimizers={"net": optimizer})
    for step in loop:
        for part in step:
            x, y = part.batch
            (part.weight * F.cross_entropy(net(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.evaluates:
            net.eval()
            with torch.no_grad():
                yield loop.measure(accuracy=(net(X[N:]).argmax(-1) == Y[N:]).double().mean())


case(
    "eval_left_on",
    eval_left_on,
    "loop",
    "refused",
    "after the first evaluation it is another training, and how soon depends on training.evaluations (no twin: dropout)",
)

# -- 27 a parameter in no optimizer


class PromptNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.zeros(FEATURES))
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.double()

    def forward(self, x):
        return self.body(x + self.prompt)


class NotOptimized(Classifier):
    """A learnable prompt was added to the model; the optimizer still gets model.body.parameters() only."""

    def model(self, setup):
        return seeded(PromptNet)

    def optimizer(self, model, setup):
        return torch.optim.SGD(model.body.parameters(), lr=setup.learning_rate, momentum=0.9)


def twin_not_optimized(steps):
    model = seeded(PromptNet)
    return fit(model, sgd(model.parameters()), lambda i: F.cross_entropy(model(X[i]), Y[i]), steps)


case(
    "param_in_no_optimizer",
    NotOptimized,
    "task",
    "refused",
    "a parameter that requires grad never moves: to be named, at least",
    twin_not_optimized,
)

# -- 28 clipping in tensor hooks


class ClampInHooks(Classifier):
    """The popular answer: for p in parameters: p.register_hook(lambda g: clamp(g, -c, c)), which clips every micro-batch on its own."""

    def model(self, setup):
        model = mlp()
        for p in model.parameters():
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return model


def twin_clamp(steps):
    model = mlp()
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return fit(model, sgd(model.parameters()), lambda i: F.cross_entropy(model(X[i]), Y[i]), steps)


case(
    "clamp_in_hooks",
    ClampInHooks,
    "task",
    "refused",
    "non-linear in each micro-batch's gradient; a deep copy of the model loses the hooks and with them the evidence",
    twin_clamp,
)

# -- 29 numpy noise in a checkpointed block


class NoisyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, h):
        h = self.linear(h)
        if self.training:
            h = h * torch.as_tensor(np.random.lognormal(0, 0.3, size=tuple(h.shape)))
        return h.tanh()


class CheckpointedNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(FEATURES, 16), NoisyBlock(), nn.Linear(16, CLASSES)
        self.double()

    def forward(self, x):
        return self.head(checkpoint(self.block, self.stem(x), use_reentrant=False))


class NumpyNoiseCheckpoint(Classifier):
    """A checkpointed block draws from NumPy: the backward pass recomputes with other noise, which torch's preserve_rng_state does not cover."""

    def model(self, setup):
        return seeded(CheckpointedNoise)


case(
    "numpy_noise_checkpoint",
    NumpyNoiseCheckpoint,
    "task",
    "refused",
    "the gradient belongs to no forward pass that took place; neither is NumPy fixed per micro-batch (no twin: random)",
)

# -- 30 a counter in a buffer, counted by forward


class AnnealedGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.gate, self.head = (
            nn.Linear(FEATURES, 16),
            nn.Linear(FEATURES, 16),
            nn.Linear(16, CLASSES),
        )
        self.double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.calls += 1
        temperature = max(0.2, 0.8 ** int(self.calls))
        return self.head(self.body(x).tanh() * (self.gate(x) / temperature).sigmoid())


class ForwardCounter(Classifier):
    """Gumbel-softmax style annealing: forward counts its calls in a buffer, and the gate's temperature falls with them."""

    def model(self, setup):
        return seeded(AnnealedGate)


def twin_forward_counter(steps):
    model = seeded(AnnealedGate)
    return fit(model, sgd(model.parameters()), lambda i: F.cross_entropy(model(X[i]), Y[i]), steps)


case(
    "forward_counter",
    ForwardCounter,
    "task",
    "refused",
    "the temperature falls once per micro-batch instead of once per step",
    twin_forward_counter,
)

# -- 31 curriculum by an attribute of the task

DIFFICULTY = torch.rand(N + VALID, generator=torch.Generator().manual_seed(17), dtype=torch.float64)


class CurriculumAttribute(IndexedClassifier):
    """Curriculum: samples count once their difficulty is below a pace; the pace follows self.steps, which after_step increments."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def data(self, setup):
        return indexed_data(DIFFICULTY)

    def loss(self, model, batch, setup):
        _, x, y, hard = batch
        counts = (hard <= 0.4 + 0.1 * self.steps).to(x.dtype)
        return Loss((counts * F.cross_entropy(model(x), y, reduction="none")).sum(), counts.sum())

    def after_step(self, model, setup):
        self.steps += 1


def twin_curriculum(steps):
    model, n = mlp(), [0]

    def loss(i):
        counts = (DIFFICULTY[i] <= 0.4 + 0.1 * n[0]).double()
        return (counts * F.cross_entropy(model(X[i]), Y[i], reduction="none")).sum() / counts.sum()

    def after():
        n[0] += 1

    return fit(model, sgd(model.parameters()), loss, steps, after=after)


case(
    "curriculum_attribute",
    CurriculumAttribute,
    "task",
    "refused",
    "right until it resumes: the counter is not in the checkpoint; steps of the profile or the examination may have moved it, too",
    twin_curriculum,
)

# -- 32 a data set that counts its reads


class SelfPaced(Dataset):
    """Easy samples first: an index beyond the pace is replaced by an easier one; the pace grows with the reads."""

    def __init__(self):
        self.order = DIFFICULTY[:N].argsort()
        self.reads = 0

    def __len__(self):
        return N

    def __getitem__(self, i):
        pace = min(N, 30 + self.reads // 2)
        self.reads += 1
        i = int(self.order[int(i) % pace])
        return X[i], Y[i]


class CurriculumDataset(Classifier):
    """A curriculum inside the data set, paced by the number of __getitem__ calls instead of a sampler."""

    def data(self, setup):
        return Data(SelfPaced(), TensorDataset(X[N:], Y[N:]))


case(
    "curriculum_dataset",
    CurriculumDataset,
    "task",
    "refused",
    "what an index gives depends on how often anybody read before: loader processes, look-ahead, resuming, the examination (no twin)",
)

# -- 33 a stateful loss


class RunningLossNorm(Classifier):
    """Two tasks balanced by a moving average of their losses, a float of the task that the loss updates."""

    def __init__(self):
        super().__init__()
        self.average = [1.0, 1.0]

    def loss(self, model, batch, setup):
        x, y = batch
        out = model(x)
        terms = F.cross_entropy(out, y, reduction="sum"), out.square().sum()
        for k, term in enumerate(terms):
            self.average[k] = 0.9 * self.average[k] + 0.1 * float(term.detach()) / len(y)
        return Loss(sum(term / a for term, a in zip(terms, self.average)), len(y))


def twin_running(steps):
    model, average = mlp(), [1.0, 1.0]

    def loss(i):
        out = model(X[i])
        terms = F.cross_entropy(out, Y[i]), out.square().sum(1).mean()
        for k, term in enumerate(terms):
            average[k] = 0.9 * average[k] + 0.1 * float(term.detach())
        return sum(term / a for term, a in zip(terms, average))

    return fit(model, sgd(model.parameters()), loss, steps)


case(
    "running_loss_norm",
    RunningLossNorm,
    "task",
    "refused",
    "the averages move once per micro-batch and are in no checkpoint",
    twin_running,
)

# -- 34 load balancing of a mixture of experts


class SwitchBalance(Classifier):
    """Switch Transformer's auxiliary loss: experts * sum_e (share of samples of e) * (mean probability of e), times the samples."""

    def model(self, setup):
        return seeded(MoE)

    def loss(self, model, batch, setup):
        x, y = batch
        out, logits, chosen = model(x)
        share = F.one_hot(chosen, 3).to(x.dtype).mean(0)
        balance = 3 * (share * logits.softmax(-1).mean(0)).sum()
        return Loss(F.cross_entropy(out, y, reduction="sum") + 0.1 * balance * len(y), len(y))

    def score(self, model, batch, setup):
        x, y = batch
        return {"accuracy": Score((model(x)[0].argmax(-1) == y).sum(), len(y))}


def twin_switch(steps):
    model = seeded(MoE)

    def loss(i):
        out, logits, chosen = model(X[i])
        share = F.one_hot(chosen, 3).double().mean(0)
        return F.cross_entropy(out, Y[i]) + 0.3 * (share * logits.softmax(-1).mean(0)).sum()

    return fit(model, sgd(model.parameters()), loss, steps)


case(
    "switch_balance",
    SwitchBalance,
    "task",
    "refused",
    "a product of two means over the batch is not a sum over samples",
    twin_switch,
)

# -- 35 RetinaNet's clamped denominator

RARE = (torch.rand(N + VALID, generator=torch.Generator().manual_seed(19)) < 0.08).double()


def focal(logits, y):
    p = logits.sigmoid()
    p = p * y + (1 - p) * (1 - y)
    return ((1 - p) ** 2 * F.binary_cross_entropy_with_logits(logits, y, reduction="none")).sum()


class FocalClampedPositives(Task):
    """Focal loss divided by max(1, positives), as in RetinaNet: where positives are rare, micro-batches without one add a 1 to the denominator."""

    def data(self, setup):
        return Data(TensorDataset(X[:N], RARE[:N]), TensorDataset(X[N:], RARE[N:]))

    def model(self, setup):
        return mlp(out=1)

    def optimizer(self, model, setup):
        return torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9)

    def loss(self, model, batch, setup):
        x, y = batch
        return Loss(focal(model(x).squeeze(1), y), y.sum().clamp(min=1))

    def score(self, model, batch, setup):
        x, y = batch
        return {"accuracy": Score(((model(x).squeeze(1) > 0) == (y > 0.5)).sum(), len(y))}


def twin_focal(steps):
    model = mlp(out=1)
    return fit(
        model,
        sgd(model.parameters()),
        lambda i: focal(model(X[i]).squeeze(1), RARE[i]) / RARE[i].sum().clamp(min=1),
        steps,
    )


case(
    "focal_clamped",
    FocalClampedPositives,
    "task",
    "refused",
    "sum of max(1, positives) over micro-batches is not max(1, positives) of the step; hidden where every chosen part holds a positive",
    twin_focal,
)

# -- 36 replay


class ReplayBuffer(Classifier):
    """Experience replay for continual learning: the loss stores its batch in the task and adds the loss of random stored samples."""

    def __init__(self):
        super().__init__()
        self.memory = []

    def loss(self, model, batch, setup):
        x, y = batch
        total = F.cross_entropy(model(x), y, reduction="sum")
        if self.memory:
            old = random.sample(self.memory, min(len(self.memory), len(y)))
            xs, ys = torch.stack([o[0] for o in old]), torch.stack([o[1] for o in old])
            total = total + F.cross_entropy(model(xs), ys) * len(y)
        self.memory = (self.memory + list(zip(x.detach(), y)))[-60:]
        return Loss(total, len(y))


case(
    "replay_buffer",
    ReplayBuffer,
    "task",
    "refused",
    "a micro-batch replays samples of the one before it in the same step; the memory is in no checkpoint (no twin: random)",
)

# -- 37 rollouts of the current policy in a stream


class PolicyStream(IterableDataset):
    def __init__(self, task):
        self.task = task

    def __iter__(self):
        while True:
            obs = torch.randn(FEATURES, dtype=torch.float64)
            with torch.no_grad():
                log_p = self.task.policy(obs[None])[0].log_softmax(-1)
            action = torch.multinomial(log_p.exp(), 1)[0]
            reward = (action == obs[:CLASSES].argmax()).double() - 0.25
            yield obs, action, log_p[action], reward


class OnPolicyStream(Task):
    """PPO whose stream plays the policy that is being trained: it iterates a copy, reads ahead, and cannot be read over again."""

    def data(self, setup):
        self.policy = mlp()
        fixed = torch.randn(VALID, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(23))
        return Data(PolicyStream(self), TensorDataset(fixed, fixed[:, :CLASSES].argmax(1)), samples=N)

    def model(self, setup):
        return self.policy

    def optimizer(self, model, setup):
        return torch.optim.Adam(model.parameters(), lr=setup.learning_rate, betas=setup.betas, eps=setup.eps)

    def loss(self, model, batch, setup):
        obs, action, old, advantage = batch
        ratio = (model(obs).log_softmax(-1).gather(1, action[:, None]).squeeze(1) - old).exp()
        return Loss(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum(), len(obs))

    def score(self, model, batch, setup):
        obs, best = batch
        return {"accuracy": Score((model(obs).argmax(1) == best).sum(), len(obs))}


case(
    "on_policy_stream",
    OnPolicyStream,
    "task",
    "refused",
    "each pass iterates a deep copy of the stream, hence of the policy: rollouts silently stay those of the initial weights (no twin)",
)

# -- 38 spectral normalisation


class SpectralNorm(Classifier):
    """Spectral normalisation by torch's parametrization: each forward pass in training mode does one power iteration."""

    def model(self, setup):
        return seeded(
            lambda: nn.Sequential(
                nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 16)),
                nn.Tanh(),
                nn.utils.parametrizations.spectral_norm(nn.Linear(16, CLASSES)),
            ).double()
        )


def twin_spectral(steps):
    model = SpectralNorm().model(None)
    return fit(model, sgd(model.parameters()), lambda i: F.cross_entropy(model(X[i]), Y[i]), steps)


case(
    "spectral_norm",
    SpectralNorm,
    "task",
    "refused",
    "one power iteration per micro-batch: small, but the step depends on its split; documented as reported, so naming it is enough",
    twin_spectral,
)

# -- 39 a generator of the task's own


class OwnGenerator(Classifier):
    """Input noise from a torch.Generator that the task keeps: the trial's seed does not reach it, nor does a checkpoint hold it."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1234)

    def loss(self, model, batch, setup):
        x, y = batch
        noisy = x + 0.3 * torch.randn(x.shape, dtype=x.dtype, generator=self.generator)
        return Loss(F.cross_entropy(model(noisy), y, reduction="sum"), len(y))


case(
    "own_generator",
    OwnGenerator,
    "task",
    "refused",
    "draws cannot be held fixed or resumed: to be named as such, not measured as a difference of the loss (no twin: random)",
)
