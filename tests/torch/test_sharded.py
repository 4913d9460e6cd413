"""`spmd.torch.shard`: a module's forward pass on a mesh is the module's own."""

import copy
from typing import Any

import pytest

pytest.importorskip("spmd.torch", reason="needs torch and torchax: .[torch]", exc_type=ImportError)

import numpy as np
import torch
from torch import nn

import spmd
import spmd.torch
from spmd.measure.labels import layer_of
from tests.torch.modules import CNN_RULES, FN_RULES, Fn, Tied, cnn, images, seeded, tokens, x


@pytest.fixture(scope="module")
def sharded(mesh):
    """A CNN in evaluation mode."""
    rules = {**CNN_RULES, "input": ("data",)}
    return spmd.torch.shard(seeded(cnn).eval(), mesh, rules, (images()[0],))


def close(found, wanted):
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-5)


def test_parameters_lie_as_the_rules_say_and_the_program_knows_torchs_names(sharded):
    specs = {name: tuple(p.sharding.spec) for name, p in sharded.parameters.items()}
    assert specs["0.weight"][0] == "model" and specs["5.weight"][1] == "model"
    assert set(sharded.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    text = sharded.compiled.explain(prices=False)
    assert "state/5.weight" in text and "inputs/input" in text
    layers = {layer_of(op.loc) for op in sharded.compiled.stages.program.body.ops}
    assert any(layer.startswith("*/") for layer in layers)  # 0/conv2d, 5/linear
    parts = [*sharded.module.modules()]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in parts)


def test_another_shape_compiles_again(sharded):
    pixels = images()[0][:4]
    first = sharded.compiled
    close(sharded(pixels), sharded.module(pixels))
    assert sharded.compiled is not first
    sharded(images()[0])
    assert sharded.compiled is first


@pytest.mark.parametrize("name", [0, "x", "*x"])
def test_inputs_are_named_or_numbered(mesh, name):
    sharded = spmd.torch.shard(Fn(), mesh, {name: ("data", None), "lin.weight": ("model",)}, (x(),))
    (entries,) = [s.spec for s in sharded.compiled.in_shardings[2].values()]
    assert entries[0] == "data"


def test_keyword_inputs_and_structured_results(mesh):
    module = Fn(lambda self, x: {"y": self.lin(x["a"]) + x["b"], "kept": None, "n": 3})
    inputs = {"a": x(), "b": x()}
    found = spmd.torch.shard(module, mesh, {"x.*": ("data",), "lin.weight": ("model",)})(x=inputs)
    assert found["kept"] is None and found["n"] == 3
    close(found["y"], module(inputs)["y"])


def inplace(self, x):
    y = self.lin(x).clone()
    y[:, 0] = 0
    y[:, 1:3] += 1
    return y.mul_(2)


def keeping(self, x):
    self.last = self.lin(x)
    return self.last


SAME = {
    "a plain attribute": lambda self, x: self.lin(x) * self.constant,
    "a tensor without a device": lambda self, x: self.lin(x) + torch.arange(16),
    "a tensor of the CPU": lambda self, x: self.lin(x) + torch.arange(16, device="cpu"),
    "a tensor of numbers": lambda self, x: self.lin(x) + torch.tensor([1.0] * 16),
    "changes in place": inplace,
    "a view": lambda self, x: self.lin(x)[:, :4],
    "bfloat16": lambda self, x: self.lin(x).to(torch.bfloat16),
    "a tensor of no input": lambda self, x: torch.ones(2, dtype=torch.bfloat16),
    "booleans": lambda self, x: self.lin(x) > 0,
    "what is kept from the forward pass": keeping,
}


def test_modules_may_do(mesh):
    module = Fn(lambda self, x: {name: fn(self, x) for name, fn in SAME.items()})
    attributes = set(vars(module))
    found = spmd.torch.shard(module, mesh, FN_RULES)(x())
    assert set(vars(module)) == attributes, "a traced tensor was left in the module"
    for name, wanted in module(x()).items():
        assert found[name].dtype == wanted.dtype, name
        rtol = 2e-2 if name == "bfloat16" else 1e-5
        torch.testing.assert_close(found[name], wanted.detach(), rtol=rtol, atol=1e-5)


def test_buffers_that_change_are_kept(mesh):
    def counting(self, x):
        self.count.add_(1.0)
        self.hidden = self.hidden * 2
        return self.lin(x) * self.count.sum()

    module = Fn(counting)
    reference = copy.deepcopy(module)
    sharded = spmd.torch.shard(module, mesh, FN_RULES)
    for _ in range(2):
        close(sharded(x()), reference(x()))
    close(sharded.state_dict()["count"], reference.count)
    close(torch.tensor(np.array(sharded.buffers["hidden"])), reference.hidden)
    assert "hidden" not in sharded.state_dict()  # it is not persistent


def test_modes_are_honoured_and_dropout_keeps_its_share(mesh):
    module = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
    sharded = spmd.torch.shard(module, mesh, {"0.weight": ("model",), "input": ("data",)})
    first, second = sharded(x()), sharded(x())
    assert not torch.equal(first, second)
    again = spmd.torch.shard(module, mesh, {"0.weight": ("model",), "input": ("data",)})
    assert torch.equal(first, again(x())) and torch.equal(second, again(x()))
    module.eval()
    close(sharded(x()), module(x()))
    sharded = spmd.torch.shard(nn.Dropout(0.25).train(), mesh, {"input": ("data",)})
    kept = sharded(torch.ones(64, 512))
    assert 0.72 < (kept > 0).float().mean() < 0.78
    assert set(np.unique(kept.numpy().round(4))) == {0.0, np.float32(1.3333)}


def test_state_dicts_go_in_and_out(mesh):
    sharded = spmd.torch.shard(seeded(cnn).eval(), mesh, CNN_RULES)
    other = copy.deepcopy(sharded.module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    sharded.load_state_dict(other.state_dict())  # before anything is compiled
    assert torch.equal(sharded.state_dict()["5.bias"], other[5].bias)
    pixels, _ = images()
    close(sharded(pixels), other(pixels))
    assert list(sharded.state_dict()) == list(other.state_dict())
    sharded.load_state_dict(sharded.module.state_dict())  # and where tensors lie on the mesh
    close(sharded(pixels), sharded.module(pixels))
    for name, tensor in sharded.module.state_dict().items():
        torch.testing.assert_close(sharded.state_dict()[name], tensor, rtol=0, atol=0)


def test_a_module_without_values_gets_them_from_a_state_dict(mesh):
    with torch.device("meta"):
        empty = cnn().eval()
    full = seeded(cnn).eval()
    sharded = spmd.torch.shard(empty, mesh, CNN_RULES)
    sharded.load_state_dict(full.state_dict())
    close(sharded(images()[0]), full(images()[0]))


def test_tied_tensors_are_one_and_have_one_spec(mesh):
    module = Tied()
    sharded = spmd.torch.shard(module, mesh, {"head.weight": ("model", None)})
    close(sharded(tokens()), module(tokens()))
    assert list(sharded.parameters) == ["embed.weight"]
    found = sharded.state_dict()
    assert list(found) == ["embed.weight", "head.weight"]
    assert found["embed.weight"] is found["head.weight"]
    rules = {"embed.weight": ("model", None), "head.weight": (None, "model")}
    with pytest.raises(spmd.SpecError, match="one tensor"):
        spmd.torch.shard(Tied(), mesh, rules, (tokens(),))


def value_dependent(self, x):
    return self.lin(x) if x.sum() > 0 else x


class Doubled(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def under_autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        return self.lin(x)


WRONG: dict[str, Any] = {
    "a branch on values": (value_dependent, spmd.FrontendError, "depends on the values"),
    "an item": (lambda s, x: x * x.sum().item(), spmd.FrontendError, "depends on the values"),
    "a boolean index": (lambda s, x: x[x[:, 0] > 0], spmd.FrontendError, "on the values"),
    "an op": (lambda s, x: torch.geqrf(x)[0], spmd.UnsupportedOpError, "aten::geqrf"),
    "a result": (lambda s, x: object(), spmd.ArgumentError, "returns a object"),
    "a Function": (lambda s, x: Doubled.apply(s.lin(x)), spmd.FrontendError, "calls Doubled"),
    "autocast": (under_autocast, spmd.FrontendError, "torch.autocast"),
    "data": (lambda s, x: s.lin(x).data, spmd.FrontendError, "tensor.data"),
    "a parameter of others": (
        lambda s, x, w=nn.Parameter(torch.ones(16)): x * w,  # noqa: B008
        spmd.FrontendError,
        "not its own",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_traced_is_one_error(mesh, name):
    fn, error, message = WRONG[name]
    module = Fn(fn)
    with pytest.raises(error, match=message) as caught:
        spmd.torch.shard(module, mesh, FN_RULES, (x(),))
    if error is spmd.UnsupportedOpError or "values" in message:
        assert "test_sharded.py" in str(caught.value.source)
    assert isinstance(module.lin.weight, nn.Parameter)  # the module is whole


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"lin.wieght": ("model",)}, "matches no parameter, buffer or input"),
        ({3: ("data",)}, "no positional input"),
        ({"lin.weight": ("modle",)}, "unknown axis 'modle'"),
        ({"lin.bias": ("model", None)}, "spec of argument state/lin.bias is for 2 dims"),
        ({"count": (("data", "model"),)}, "does not divide"),
    ],
)
def test_rules_that_do_not_fit(mesh, rules, message):
    with pytest.raises(spmd.SpecError, match=message):
        spmd.torch.shard(Fn(), mesh, rules, (x(),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fn().double(), "float64"),
        (lambda: torch.relu, "no torch module"),
        (lambda: Fn().to("meta"), "meta device"),
    ],
)
def test_modules_that_do_not_fit(mesh, make, message):
    with pytest.raises(spmd.ArgumentError, match=message):
        spmd.torch.shard(make(), mesh, FN_RULES, (x(),))


def test_a_state_dict_fits_and_is_loaded_as_a_whole_or_not_at_all(mesh):
    sharded = spmd.torch.shard(Fn(), mesh, FN_RULES)
    given = sharded.state_dict()
    with pytest.raises(spmd.ArgumentError, match="unknown more; missing count"):
        sharded.load_state_dict({n: t for n, t in given.items() if n != "count"} | {"more": x()})
    with pytest.raises(spmd.ArgumentError, match="'count' cannot be loaded"):
        sharded.load_state_dict({**given, "count": torch.ones(5)})
    with pytest.raises(spmd.ArgumentError, match="nothing is compiled yet"):
        sharded.compiled.summary()
    both = spmd.torch.shard(nn.Linear(16, 8), mesh, {}, (x(),))
    before = both.state_dict()
    with pytest.raises(spmd.ArgumentError, match="cannot be loaded"):
        both.load_state_dict({"weight": torch.zeros(8, 16), "bias": torch.zeros(3)})
    torch.testing.assert_close(both.state_dict(), before)


class Times(nn.Module):
    """Multiplies by a constant that it is called with."""

    def forward(self, x, constant):
        return x * constant


class Scaled(nn.Module):
    """Multiplies by a number that is extra state."""

    scale = 1.0

    def forward(self, x):
        return x * self.scale

    def get_extra_state(self):
        return self.scale

    def set_extra_state(self, state):
        self.scale = state


def test_extra_state_is_loaded(mesh):
    sharded = spmd.torch.shard(Scaled(), mesh)
    close(sharded(x()), x())
    assert sharded.state_dict() == {"_extra_state": 1.0}
    sharded.load_state_dict({"_extra_state": 3.0})
    close(sharded(x()), 3 * x())


def test_constants_of_other_types_are_others(mesh):
    sharded, module = spmd.torch.shard(Times(), mesh), Times()
    for constant in (2, 2.0, 1, True, 0.0, -0.0):
        for given in (torch.arange(16), torch.ones(16)):
            found, wanted = sharded(given, constant), module(given, constant)
            assert found.is_floating_point() == wanted.is_floating_point()
            close(found.float(), wanted.float())
            assert torch.equal(torch.signbit(found), torch.signbit(wanted))
    sharded(x(), float("nan"))
    first = sharded.compiled
    sharded(x(), float("nan"))
    assert sharded.compiled is first
