"""Small torch modules, and torch's own training beside ours."""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import spmd.torch

ROWS = 8


class Fn(nn.Module):  # type: ignore[misc]
    """A linear layer and a function of it: `fn(module, x)`."""

    def __init__(self, fn=None):
        super().__init__()
        self.lin = nn.Linear(16, 16)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("count", torch.arange(4.0))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.constant = torch.full((16,), 2.0)
        self.fn = fn or (lambda self, x: self.lin(x))

    def forward(self, x):
        return self.fn(self, x)


FN_RULES = {"lin.weight": ("model", None), "x": ("data", None)}


class Tied(nn.Module):  # type: ignore[misc]
    """An embedding whose weight is the last layer's, too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
    )


CNN_RULES = {"0.weight": ("model",), "5.weight": (None, "model")}


def x():
    return torch.tensor(np.random.default_rng(0).standard_normal((ROWS, 16), np.float32))


def images():
    """Images of 8 x 8, and their classes."""
    random = np.random.default_rng(0)
    pixels = random.standard_normal((ROWS, 3, 8, 8), np.float32)
    return torch.tensor(pixels), torch.tensor(random.integers(0, 10, ROWS))


def tokens(length=8, vocabulary=32):
    return torch.tensor(np.random.default_rng(0).integers(0, vocabulary, (ROWS, length)))


def square(model, x):
    """A loss with a gradient for every entry."""
    return (model(x) ** 2).mean()


def entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def seeded(make):
    """A module with the same random parameters each time."""
    torch.manual_seed(0)
    return make()


def sgd(parameters):
    """SGD with momentum: rounding is not blown up as Adam does where a gradient is nearly zero."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def torch_steps(module, loss, optimizer, batch, steps):
    """Trains a module as torch does; the losses."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(module, *batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def check_steps(make, loss, mesh, rules, batch, optimizer=sgd, steps=3, atol=1e-5):
    """Holds that our steps give the losses, parameters, buffers and state that torch's give.

    Returns:
      Our step.
    """
    ours, theirs = seeded(make), seeded(make)
    before = copy.deepcopy(ours.state_dict())
    step = spmd.torch.train_step(ours, loss, optimizer(ours.parameters()), mesh, rules)
    losses = [float(step(*batch)) for _ in range(steps)]
    reference = optimizer(theirs.parameters())
    np.testing.assert_allclose(
        losses, torch_steps(theirs, loss, reference, batch, steps), rtol=1e-5, atol=atol
    )
    assert_same(step.state_dict(), theirs.state_dict(), atol)
    found, wanted = step.optimizer_state_dict()["state"], reference.state_dict()["state"]
    assert found.keys() == wanted.keys()
    for number, state in wanted.items():
        assert_same(found[number], state, atol)
    assert_same(ours.state_dict(), before, 0)  # the module itself stays
    return step


def assert_same(found, wanted, atol):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=atol)
