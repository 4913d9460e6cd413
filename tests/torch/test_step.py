"""`spmd.torch.train_step`: steps on a mesh give what torch's own steps give."""

import copy
from typing import Any

import pytest

pytest.importorskip("spmd.torch", reason="needs torch and torchax: .[torch]", exc_type=ImportError)

import numpy as np
import optax
import torch
from torch import nn

import spmd
import spmd.torch
from tests.torch.modules import (
    CNN_RULES,
    FN_RULES,
    Fn,
    Tied,
    assert_same,
    check_steps,
    cnn,
    entropy,
    images,
    seeded,
    sgd,
    square,
    tokens,
    torch_steps,
    x,
)

TWO_LAYERS = {"0.weight": ("model", None), "2.weight": (None, "model"), "x": ("data", None)}


def two_layers():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def test_batch_norm_and_its_statistics(mesh):
    step = check_steps(cnn, entropy, mesh, {**CNN_RULES, "x": ("data",)}, images())
    assert step.state_dict()["1.num_batches_tracked"] == 3
    assert step.parameters["0.weight"].sharding.spec[0] == "model"
    assert step.optimizer_state["momentum_buffer"]["5.weight"].sharding.spec[1] == "model"


def groups(parameters):
    first, *rest = parameters
    return torch.optim.AdamW(
        [{"params": [first], "weight_decay": 0.5, "lr": 0.1}, {"params": rest}]
    )


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd with all it has": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1
    ),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(
        p, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1, amsgrad=True
    ),
    "adamw with all it has": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.01), amsgrad=True, maximize=True
    ),
    "groups": groups,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch(mesh, name):
    check_steps(two_layers, square, mesh, TWO_LAYERS, (x(),), OPTIMIZERS[name])


def test_schedulers_work_and_compile_nothing(mesh):
    ours, theirs = seeded(two_layers), seeded(two_layers)
    optimizer, reference = sgd(ours.parameters()), sgd(theirs.parameters())
    step = spmd.torch.train_step(ours, square, optimizer, mesh, TWO_LAYERS)
    make = torch.optim.lr_scheduler.ExponentialLR
    schedulers = make(optimizer, 0.5), make(reference, 0.5)
    compiled = set()
    for _ in range(3):
        step(x())
        torch_steps(theirs, square, reference, (x(),), 1)
        for scheduler in schedulers:
            scheduler.step()
        compiled.add(id(step.compiled))
    assert_same(step.state_dict(), theirs.state_dict(), 1e-6)
    assert len(compiled) == 1


def test_optax(mesh):
    ours, theirs = seeded(two_layers), seeded(two_layers)
    step = spmd.torch.train_step(ours, square, optax.sgd(0.1, momentum=0.9), mesh, TWO_LAYERS)
    for _ in range(3):
        step(x())
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    torch_steps(theirs, square, reference, (x(),), 3)
    assert_same(step.state_dict(), theirs.state_dict(), 1e-6)
    saved = step.optimizer_state_dict()
    other = spmd.torch.train_step(
        seeded(two_layers), square, optax.sgd(0.1, momentum=0.9), mesh, TWO_LAYERS
    )
    other.load_state_dict(step.state_dict())
    other.load_optimizer_state_dict(saved)
    assert float(other(x())) == float(step(x()))
    assert_same(other.state_dict(), step.state_dict(), 0)


def test_frozen_parameters_stay(mesh):
    def make():
        module = two_layers()
        module[0].weight.requires_grad_(False)
        return module

    step = check_steps(make, square, mesh, TWO_LAYERS, (x(),))
    assert torch.equal(step.state_dict()["0.weight"], seeded(make)[0].weight)
    assert "0.weight" not in step.optimizer_state["momentum_buffer"]


def test_tied_weights_are_updated_once(mesh):
    def loss(model, tokens):
        return nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )

    rules = {"head.weight": ("model", None), "tokens": ("data", None)}
    check_steps(Tied, loss, mesh, rules, (tokens(),))


def with_a_teacher(self, x):
    with torch.no_grad():
        target = self.lin(x)
    return target * self.lin(x)


def with_used_buffers(self, x):
    self.count.mul_(0.5).add_(self.lin(x).detach().mean())
    return self.lin(x) + self.count.sum()


GRADIENTS = {
    "no_grad": with_a_teacher,
    "detach": lambda s, x: s.lin(x).detach() * s.lin(x) + torch.detach(s.lin(x)[:, :3]).sum(),
    "detach of a view": lambda s, x: s.lin(x)[:, :3].detach().sum() * s.lin(x),
    "a detached weight": lambda s, x: nn.functional.linear(x, s.lin.weight.detach()) * s.lin(x),
    "a result without effect": lambda s, x: (s.unused(x[:, :3]), s.lin(x))[1],
    "a gradient that is constant": lambda s, x: s.lin(x) + s.lin.bias,
    "used buffers": with_used_buffers,
    "casts of a weight": lambda s, x: (
        torch.no_grad()(lambda: s.lin.weight.to(x.device))() @ x.T + s.lin(x).T.sum()
    ),
}


class Each(nn.ModuleDict):  # type: ignore[misc]
    """All of them at once, each with parameters of its own."""

    def __init__(self):
        super().__init__({name: Fn(fn) for name, fn in GRADIENTS.items()})

    def forward(self, x):
        return sum(part(x).sum() / 64 for part in self.values())


def total(model, x):
    return model(x)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, weight_decay=0.5)


def test_gradients_stop_where_torchs_do(mesh):
    """And AdamW does not decay what has no gradient, as `unused` in all of these."""
    rules = {"*.lin.weight": ("model", None), "x": ("data", None)}
    step = check_steps(Each, total, mesh, rules, (x(),), adamw, steps=2)
    for name, part in step.module.items():
        assert torch.equal(step.state_dict()[f"{name}.unused.weight"], part.unused.weight)


def test_dropout_differs_from_step_to_step_and_repeats_by_seed(mesh):
    module = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    rules = {"0.weight": ("model",), "x": ("data",)}
    module.load_state_dict({"0.weight": torch.eye(16), "0.bias": torch.zeros(16)})
    step = spmd.torch.train_step(module, square, optimizer, mesh, rules, seed=1)
    assert (step.seed, step.steps) == (1, 0)

    def losses(seed):
        step.seed, step.steps = seed, 0
        return [float(step(x())) for _ in range(3)]

    first, again, other = losses(1), losses(1), losses(2)
    assert len(set(first)) == 3 and first == again and not set(first) & set(other)
    module.eval()
    assert float(step(x())) == pytest.approx(float((x() ** 2).mean()), rel=1e-6)


@pytest.mark.thorough
def test_a_run_goes_on_where_it_was_saved(mesh):
    def make():
        module = seeded(
            lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        )
        rules = {"0.weight": ("model",), "x": ("data",)}
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        return spmd.torch.train_step(module, square, optimizer, mesh, rules, seed=3)

    whole, resumed = make(), make()
    for _ in range(2):
        whole(x())
    saved = copy.deepcopy((whole.state_dict(), whole.optimizer_state_dict()))
    losses = [float(whole(x())) for _ in range(2)]
    resumed.seed = 0  # it is saved
    resumed.load_state_dict(saved[0])
    resumed.load_optimizer_state_dict(saved[1])
    assert [float(resumed(x())) for _ in range(2)] == losses
    assert_same(resumed.state_dict(), whole.state_dict(), 0)


def test_torch_takes_the_optimizer_state_and_gives_it(mesh):
    ours, theirs = seeded(two_layers), seeded(two_layers)
    reference = adamw(theirs.parameters())
    torch_steps(theirs, square, reference, (x(),), 2)
    ours.load_state_dict(theirs.state_dict())
    optimizer = adamw(ours.parameters())
    optimizer.load_state_dict(reference.state_dict())  # what it holds is taken over
    step = spmd.torch.train_step(ours, square, optimizer, mesh, TWO_LAYERS)
    step(x())
    torch_steps(theirs, square, reference, (x(),), 1)
    assert_same(step.state_dict(), theirs.state_dict(), 1e-6)
    reference.load_state_dict(step.optimizer_state_dict())  # and torch goes on
    theirs.load_state_dict(step.state_dict())
    step(x())
    torch_steps(theirs, square, reference, (x(),), 1)
    assert_same(step.state_dict(), theirs.state_dict(), 1e-6)


def test_a_criterion_and_batches_of_two_sizes(mesh):
    module = seeded(cnn)
    rules: dict[Any, Any] = {**CNN_RULES, 0: ("data",)}
    step = spmd.torch.train_step(
        module, nn.CrossEntropyLoss(), sgd(module.parameters()), mesh, rules
    )
    theirs = seeded(cnn)
    reference = sgd(theirs.parameters())
    pixels, classes = images()
    for rows in (8, 4, 8):
        batch = pixels[:rows], classes[:rows]
        found = float(step(*batch))
        (wanted,) = torch_steps(theirs, entropy, reference, batch, 1)
        assert found == pytest.approx(wanted, rel=1e-5)
    assert_same(step.state_dict(), theirs.state_dict(), 1e-5)


def test_batches_may_be_arrays_of_jax(mesh):
    module = seeded(two_layers)
    step = spmd.torch.train_step(module, square, sgd(module.parameters()), mesh, TWO_LAYERS)
    placed = spmd.mark_sharding(x().numpy(), mesh, ("data", None))
    wanted = square(seeded(two_layers), x()).item()
    assert float(step(placed)) == pytest.approx(wanted, rel=1e-5)


def clamping(self, x):
    with torch.no_grad():
        self.lin.weight.clamp_(-0.1, 0.1)
    return self.lin(x)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a loss of many numbers": ({"loss": lambda m, x: m(x)}, "no number to minimize"),
    "a loss that is no tensor": ({"loss": lambda m, x: 1.0}, "no number to minimize"),
    "a loss of no parameter": ({"loss": lambda m, x: x.sum()}, "depends on no parameter"),
    "a loss that is none": ({"loss": 3}, "the loss is a int"),
    "an optimizer that is none": ({"optimizer": 1e-3}, "is no optimizer"),
    "another of torch's": ({"optimizer": torch.optim.Adagrad}, "Adagrad of torch is not known"),
    "another module's": (
        {"optimizer": lambda _: sgd(two_layers().parameters())},
        "not the module's",
    ),
    "a parameter that changes": ({"module": Fn(clamping)}, "changes the parameter 'lin.weight'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_trained_is_one_error(mesh, name):
    given, message = WRONG[name]
    module = given.get("module") or Fn()
    optimizer = given.get("optimizer", sgd)
    if callable(optimizer):
        optimizer = optimizer(module.parameters())
    with pytest.raises(spmd.SpmdError, match=message):
        spmd.torch.train_step(module, given.get("loss", square), optimizer, mesh, FN_RULES)(x())


def test_planning_needs_no_step_and_an_optimizer_state_has_to_fit(mesh):
    module = Fn()
    step = spmd.torch.train_step(module, square, sgd(module.parameters()), mesh, FN_RULES)
    text = step.compile(x()).explain(prices=False)
    assert "params/lin.weight" in text and "batch/x" in text
    assert step.steps == 0 and np.allclose(step.parameters["lin.bias"], module.lin.bias.detach())
    other = two_layers()
    with pytest.raises(spmd.ArgumentError, match="does not fit"):
        step.load_optimizer_state_dict(torch.optim.Adam([*other.parameters()][:2]).state_dict())


class Late(nn.Module):
    """Uses its second parameter when told to."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.full((16,), n)) for n in (1.0, 2.0))

    def forward(self, x, both):
        return x * self.first * (self.second if both else 1.0)


def late(model, x, both):
    return (model(x, both) ** 2).mean()


def test_a_buffer_begins_with_its_parameters_first_gradient(mesh):
    """Whether the first steps did not reach the parameter, or had no momentum."""
    ours, theirs = Late(), Late()
    made = [
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.0, dampening=0.5)
        for module in (ours, theirs)
    ]
    step = spmd.torch.train_step(ours, late, made[0], mesh)
    for momentum, both in ((0, 0), (0.9, 0), (0.9, 1), (0.9, 1), (0, 1), (0.9, 1)):
        for optimizer in made:
            optimizer.param_groups[0]["momentum"] = momentum
        step(x(), both)
        torch_steps(theirs, late, made[1], (x(), both), 1)
        assert_same(step.state_dict(), theirs.state_dict(), 1e-6)
    wanted = made[1].state_dict()["state"]
    torch.testing.assert_close(step.optimizer_state_dict()["state"], wanted, rtol=1e-5, atol=1e-5)


def test_a_state_without_moments_begins_anew(mesh):
    ours = seeded(two_layers)
    step = spmd.torch.train_step(ours, square, torch.optim.AdamW(ours.parameters()), mesh)
    step(x())
    step.load_optimizer_state_dict(torch.optim.AdamW(ours.parameters()).state_dict())
    assert step.steps == 0 and not step.optimizer_state_dict()["state"]
    assert not any(np.any(leaf) for leaf in step.optimizer_state["exp_avg_sq"].values())
