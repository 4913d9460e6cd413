"""`spmd.torch.export`: StableHLO whose arguments have torch's names."""

import pytest

pytest.importorskip("spmd.torch", reason="needs torch and torchax: .[torch]", exc_type=ImportError)

import numpy as np
import torch
from torch import nn

import spmd
import spmd.torch
from spmd.serving.bundle.read import load_bundle
from spmd.serving.bundle.wrap import wrap_stablehlo
from tests.torch.modules import CNN_RULES, Fn, Tied, cnn, images, seeded, tokens, x


@pytest.fixture(scope="module")
def exported():
    return spmd.torch.export(seeded(cnn).eval(), (images()[0],))


@pytest.fixture(scope="module")
def wanted():
    with torch.no_grad():
        return seeded(cnn).eval()(images()[0]).numpy()


def test_arguments_have_torchs_names_and_are_given_by_them(exported):
    names = {*seeded(cnn).state_dict(), "input"}
    assert set(exported.arg_names) == names
    assert set(exported.weights) == names - {"input"}
    assert exported.weights["1.num_batches_tracked"].dtype == np.int32
    with pytest.raises(spmd.ArgumentError, match="other names"):
        exported.arguments(pixels=images()[0].numpy())


def test_patterns_of_names_split_it(mesh, exported, wanted):
    rules = {**CNN_RULES, "*nput": ("data",)}
    program = spmd.compile_stablehlo(exported.module, mesh, arg_specs=rules)
    (found,) = program(*exported.arguments(input=images()[0].numpy()))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    names = dict(zip(exported.arg_names, program.in_shardings, strict=True))
    assert names["0.weight"].spec[0] == "model" and names["input"].spec[0] == "data"
    with pytest.raises(spmd.SpecError, match="wieght"):
        spmd.lower_stablehlo(exported.module, mesh, arg_specs={"0.wieght": ("model",)})


def test_a_bundle_has_them_too(mesh, exported, wanted, tmp_path):
    specs = {"weights/5.weight": (None, "model"), "input": ("data",)}
    wrap_stablehlo(tmp_path / "cnn", exported.module, weights=exported.weights, specs=specs)
    (found,) = load_bundle(tmp_path / "cnn", mesh).run("main", images()[0].numpy())
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def gelu():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


@pytest.mark.filterwarnings("ignore")  # torch's own, of its own parts
def test_what_torch_exported(mesh):
    module = seeded(gelu).eval()
    exported = spmd.torch.export(torch.export.export(module, (x(),)))
    rules = {"0.weight": ("model", None), "2.weight": (None, "model"), "input": ("data", None)}
    compiled = spmd.compile_stablehlo(exported.module, mesh, arg_specs=rules)
    (found,) = compiled(*exported.arguments(input=x().numpy()))
    np.testing.assert_allclose(found, module(x()).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # torch's own, of its own parts
def test_dims_that_torch_left_open(mesh):
    """torchax makes symbolic dims of them; `symbols=` says how large they are."""
    from torchax.export import exported_program_to_stablehlo

    module = seeded(gelu).eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(module, (x(),), dynamic_shapes=({0: batch},))
    weights, exported = exported_program_to_stablehlo(program)
    symbol = str(exported.in_avals[-1].shape[0])
    inputs = torch.cat([x(), x()])
    compiled = spmd.compile_stablehlo(exported, mesh, symbols={symbol: len(inputs)})
    (found,) = compiled(*map(np.asarray, weights), inputs.numpy())
    np.testing.assert_allclose(found, module(inputs).detach(), rtol=1e-4, atol=1e-5)


def test_results_have_names_and_tied_weights_are_one(mesh):
    class Named(Tied):
        def forward(self, tokens):
            return {"logits": super().forward(tokens), "tokens": tokens}

    exported = spmd.torch.export(Named().eval(), {"tokens": tokens()})
    assert exported.arg_names == ("embed.weight", "tokens")
    lowered = spmd.lower_stablehlo(exported.module, mesh, result_specs={"logits": ("data",)})
    assert "logits" in lowered.explain(prices=False)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (cnn(), "changes its buffer '1."),
        (nn.Dropout(), "draws random numbers"),
        (Fn(lambda self, x: torch.geqrf(x)[0]), "aten::geqrf"),
    ],
)
def test_what_has_no_export(module, message):
    with pytest.raises(spmd.SpmdError, match=message):
        spmd.torch.export(
            module.train(), (x() if not isinstance(module, nn.Sequential) else images()[0],)
        )


class Sum(nn.Module):
    def forward(self, x, *, y):
        return x - y


def test_example_inputs_by_place_and_by_name():
    given = torch.export.export(Sum(), (torch.ones(8),), {"y": torch.zeros(8)})
    assert set(spmd.torch.export(given).arg_names) == {"x", "y"}
