"""PPO on cart-pole: a sample is an episode, and the policy that is trained plays it in the loop's body."""

from collections.abc import Iterator

import torch
from bsearch import Data, Loop, Measurement
from bsearch.spaces.trial import TrialSetup
from torch import Tensor, nn
from torch.utils.data import TensorDataset

LONGEST, DISCOUNT, CLIPPED, PASSES = 200, 0.98, 0.2, 3


def moved(state: Tensor, right: Tensor) -> Tensor:
    """The cart-pole of Barto, Sutton & Anderson 1983: (episodes, 4) a fiftieth of a second later, pushed right or left."""
    _, speed, angle, turning = state.unbind(1)
    sine, cosine = angle.sin(), angle.cos()
    push = (20.0 * right - 10.0 + 0.05 * turning**2 * sine) / 1.1
    turned = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    return state + 0.02 * torch.stack([speed, push - 0.05 * turned * cosine / 1.1, turning, turned], 1)


@torch.no_grad()
def played(net: nn.Module, state: Tensor) -> tuple[Tensor, ...]:
    """Episodes from these states: states, actions, their log probabilities, which steps were played, and returns to go."""
    steps, alive = [], torch.ones(len(state))
    while len(steps) < LONGEST and alive.any():
        logit = net(state)[:, 0]
        right = torch.bernoulli(logit.sigmoid())
        steps.append((state, right, log_probability(logit, right), alive))
        state = moved(state, right)
        alive = alive * (state[:, 0].abs() < 2.4) * (state[:, 2].abs() < 0.2095)
    states, actions, said, lived = map(torch.stack, zip(*steps, strict=True))
    to_go, after = torch.zeros_like(lived), torch.zeros(len(state))
    for place in reversed(range(len(lived))):
        after = to_go[place] = lived[place] * (1 + DISCOUNT * after)
    return states, actions, said, lived, to_go


def log_probability(logit: Tensor, right: Tensor) -> Tensor:
    return -nn.functional.binary_cross_entropy_with_logits(logit, right, reduction="none")


def loss_of(net: nn.Module, episodes: tuple[Tensor, ...]) -> Tensor:
    """The mean over episodes, each the sum over its steps."""
    states, actions, said, lived, to_go = episodes
    logit, value = net(states).unbind(-1)
    missed = to_go / 20 - value
    ratio = (log_probability(logit, actions) - said).exp()
    gain = torch.minimum(ratio * missed.detach(), ratio.clamp(1 - CLIPPED, 1 + CLIPPED) * missed.detach())
    return ((missed**2 / 2 - gain) * lived).sum(0).mean() / 50


def train(setup: TrialSetup) -> Iterator[Measurement]:
    episodes = int(setup.parameters.get("episodes", 5900))
    starts = 0.1 * torch.rand(episodes + 100, 4, generator=torch.Generator().manual_seed(0)) - 0.05
    # A push to the right, and the return to go.
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=setup.learning_rate)
    data = Data(TensorDataset(starts[:-100]), TensorDataset(starts[-100:]))
    loop = Loop(setup, data, models={"net": net}, optimizers={"net": optimizer})
    for step in loop:
        rollouts = [played(net, part.batch[0]) for part in step]
        for _ in range(PASSES):
            for part, rollout in zip(step, rollouts, strict=True):
                (part.weight * loss_of(net, rollout)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.evaluates:
            lived = played(net, starts[-100:])[3]
            yield loop.measure(balanced=lived.sum(0).mean())
