"""Modules of other frameworks as bundles, from Python and from the command line."""

import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from spmd.serving.bundle import wrap
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.manifest import Variant
from spmd.serving.bundle.read import load_bundle
from spmd.serving.bundle.wrap import matched, wrap_stablehlo
from spmd.serving.tensor_backend import BundleInfer
from tests.serving.bundle.test_symbols import on_devices_of

TEXT = """
module @foreign {
  func.func public @forward(%w: tensor<8x4xf32>, %x: tensor<2x8xf32>, %b: tensor<4xf32>)
      -> (tensor<2x4xf32>, tensor<i32>) {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<2x8xf32>, tensor<8x4xf32>) -> tensor<2x4xf32>
    %1 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<4xf32>) -> tensor<2x4xf32>
    %2 = stablehlo.add %0, %1 : tensor<2x4xf32>
    %c = stablehlo.constant dense<7> : tensor<i32>
    return %2, %c : tensor<2x4xf32>, tensor<i32>
  }
}
"""
RNG = np.random.default_rng(0)
W, B, X = (RNG.normal(size=s).astype(np.float32) for s in ((8, 4), (4,), (2, 8)))


def test_text_with_names(tmp_path, mesh_of):
    wrap_stablehlo(
        tmp_path / "b", TEXT, weights={"w": W, "b": B}, arg_names=["w", "x", "b"],
        result_names=["y", "seven"], specs={"weights/w": (None, "model")},
    )  # fmt: skip
    bundle = load_bundle(tmp_path / "b", mesh_of(2, 4))
    assert bundle.weights["weights/w"].addressable_shards[0].data.shape == (8, 1)
    y, seven = bundle.run("main", X)
    np.testing.assert_allclose(y, X @ W + B, rtol=1e-5)
    assert int(seven) == 7
    infer = BundleInfer(bundle)
    assert [spec.name for spec in infer.inputs] == ["x"]
    np.testing.assert_array_equal(infer.infer({"x": X})["y"], y)


def test_command_line(tmp_path, mesh_of, capsys):
    """A module that jax lowered has names of its own."""
    lowered = jax.jit(lambda params, x: x @ params["w"]).lower({"w": W}, X)
    (tmp_path / "m.mlir").write_text(lowered.as_text(debug_info=True))
    save_file({"params/w": W}, tmp_path / "w.safetensors")
    out = str(tmp_path / "b")
    wrap.main(
        [str(tmp_path / "m.mlir"), "--out", out, "--weights", str(tmp_path / "w.safetensors")]
    )
    assert f"wrote {out}" in capsys.readouterr().out.replace("\n", "")
    bundle = load_bundle(out, mesh_of(2))
    assert set(bundle.weights) == {"weights/params/w"}
    np.testing.assert_allclose(bundle.run("main", X)[0], X @ W, rtol=1e-5)
    with pytest.raises(SystemExit, match=r"error: .* exists already"):
        wrap.main([str(tmp_path / "m.mlir"), "--out", out])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"module": "module {"}, "the module cannot be wrapped: "),
        ({"module": "/no/module.mlir"}, "no file /no/module.mlir"),
        ({"arg_names": ["w", "x"]}, "the module has 3 arguments"),
        ({"weights": {"q": W}}, "no argument of the module is called 'q'; they are w, x, b"),
        (
            {"weights": {"w": W[:4]}},
            "weights/w is float32[4, 4], and the module takes float32[8, 4]",
        ),
        ({"weights": "/no/w.safetensors"}, "/no/w.safetensors cannot be read as safetensors"),
    ],
)
def test_what_cannot_be_wrapped(given, message, tmp_path):
    with pytest.raises(BundleError, match=re.escape(message)):
        wrap_stablehlo(tmp_path / "b", **{"module": TEXT, "arg_names": ["w", "x", "b"], **given})
    assert not list(tmp_path.iterdir())


def exported():
    """A module with symbolic dims, for a file."""
    (b,) = jax.export.symbolic_shape("b")
    structs = jax.ShapeDtypeStruct(W.shape, W.dtype), jax.ShapeDtypeStruct((b, 8), W.dtype)

    def model(w, x):
        return jax.nn.softmax(x @ w), jnp.concatenate([x, x[:1], x])

    return jax.export.export(jax.jit(model))(*structs)


def test_symbolic_dims_get_their_sizes(tmp_path, mesh_of):
    (tmp_path / "m.mlirbc").write_bytes(exported().mlir_module_serialized)
    save_file({"w": W}, tmp_path / "w.safetensors")
    flags = ["--weights", str(tmp_path / "w.safetensors"), "--arg_names", "w,x"]
    wrap.main([str(tmp_path / "m.mlirbc"), "--out", str(tmp_path / "b"), *flags, "--symbols=b=2"])
    bundle = load_bundle(tmp_path / "b", mesh_of(2))
    assert not bundle.manifest.symbols
    np.testing.assert_allclose(bundle.run("main", X)[0], jax.nn.softmax(X @ W), rtol=1e-5)


def test_symbolic_dims_that_stay(tmp_path, mesh_of):
    wrap_stablehlo(tmp_path / "b", exported(), weights={"w": W}, arg_names=["w", "x"])
    bundle = load_bundle(tmp_path / "b", mesh_of(2), symbols={"b": (2, 3)})
    (entry, _) = bundle.manifest.variants("main")
    assert isinstance(entry, Variant)
    assert [leaf.shape for leaf in entry.origin.outputs] == [("b", 4), ("2*b + 1", 8)]
    for x in (X, np.concatenate([X, X[:1]])):
        found = BundleInfer(bundle).infer({"x": x})
        np.testing.assert_allclose(found["0"], jax.nn.softmax(x @ W), rtol=1e-5)
        assert found["1"].shape == (2 * len(x) + 1, 8)


def test_dims_of_results_that_are_nothing_simple(tmp_path):
    (b,) = jax.export.symbolic_shape("b")
    struct = jax.ShapeDtypeStruct((b, 2), W.dtype)
    squared = jax.export.export(jax.jit(lambda x: jnp.zeros((x.shape[0] ** 2,))))(struct)
    with pytest.raises(BundleError, match="a dim of a result is no multiple of a symbol and a num"):
        wrap_stablehlo(tmp_path / "b", squared)


def layers(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


PARAMS: dict[str, Any] = {
    "layers": [
        {"w": RNG.standard_normal((64, 64), np.float32) / 8, "b": np.zeros(64, np.float32)}
        for _ in range(2)
    ]
}
FILE = {
    f"model.layers.{i}.{name}": array
    for i, layer in enumerate(PARAMS["layers"])
    for name, array in layer.items()
}
ROWS = RNG.standard_normal((4, 64), np.float32)


@pytest.fixture
def flags(tmp_path):
    (tmp_path / "m.mlir").write_text(jax.jit(layers).lower(PARAMS, ROWS).as_text(debug_info=True))
    save_file(FILE, tmp_path / "w.safetensors")
    weights = str(tmp_path / "w.safetensors")
    return [str(tmp_path / "m.mlir"), "--out", str(tmp_path / "b"), "--weights", weights]


SPECS = [
    '{"layers.*.w": [null, "model"]}',
    pytest.param('{"model.layers.*.w": [null, "model"]}', marks=pytest.mark.heavy),
    pytest.param('{"params/layers/*/w": [null, "model"]}', marks=pytest.mark.heavy),
    '{"weights/params/layers/*/w": [null, "model"]}',
]


@pytest.mark.parametrize("specs", SPECS)
def test_the_models_own_names(tmp_path, mesh_of, flags, specs, capsys):
    """Weights have a prefix that arguments lack, and specs may be by either names."""
    (tmp_path / "specs.json").write_text(specs)
    wrap.main([*flags, "--specs", specs if "weights" in specs else str(tmp_path / "specs.json")])
    assert "note" not in capsys.readouterr().out
    bundle = load_bundle(tmp_path / "b", mesh_of(8))
    assert bundle.notes == ()
    weights = bundle.weights
    assert set(weights) == {f"weights/params/layers/{i}/{n}" for i in (0, 1) for n in "wb"}
    assert weights["weights/params/layers/1/w"].addressable_shards[0].data.shape == (64, 8)
    np.testing.assert_allclose(bundle.run("main", ROWS)[0], layers(PARAMS, ROWS), atol=1e-5)


def test_nothing_is_split_unless_it_pays(tmp_path, mesh_of, flags, capsys):
    """A number in the end: exchanges would take longer than the products."""

    def score(params, x):
        return layers(params, x).sum()

    (tmp_path / "m.mlir").write_text(jax.jit(score).lower(PARAMS, ROWS).as_text(debug_info=True))
    wrap.main(flags)
    assert "note: it has no specs: on several devices" in capsys.readouterr().out
    (note,) = load_bundle(tmp_path / "b", mesh_of(8)).notes
    assert note.startswith("nothing is split: each of the 8 devices computes everything (the bund")
    chosen = load_bundle(tmp_path / "b", mesh_of(8), auto=True)
    assert load_bundle(tmp_path / "b", mesh_of(1)).notes == ()
    assert "nothing is split: each of the 8 devices computes everything" in chosen.notes[0]
    assert "the compiler chose so" in chosen.notes[0]
    np.testing.assert_allclose(chosen.run("main", ROWS)[0], score(PARAMS, ROWS), rtol=1e-4)


@pytest.mark.usefixtures("exact_plans")
def test_the_compiler_chooses(tmp_path, mesh_of):
    """Large weights are split where they would not fit otherwise."""
    lowered = jax.jit(layers).lower(PARAMS, ROWS).as_text(debug_info=True)
    wrap_stablehlo(tmp_path / "b", lowered, weights=FILE, auto=True)
    bundle = load_bundle(tmp_path / "b", mesh_of(8), options=on_devices_of(16 << 10))
    assert bundle.notes == ()
    w = bundle.weights["weights/params/layers/0/w"]
    assert w.addressable_shards[0].data.nbytes < w.nbytes
    np.testing.assert_allclose(bundle.run("main", ROWS)[0], layers(PARAMS, ROWS), atol=1e-5)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ('{"layers.*.q": ["model"]}', "'layers.*.q' matches no leaf"),
        ('{"layers.*.w": "model"}', "has to be like"),
        ("{,}", "--specs is no JSON"),
        ("/no/such.json", "No such file"),
    ],
)
def test_specs_that_are_none(flags, specs, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        wrap.main([*flags, "--specs", specs])


def test_prefixes():
    assert matched(["m.w", "m.b"], ["p/w", "p/b", "x"]) == {"m.w": "p/w", "m.b": "p/b"}
    assert matched(["w"], ["p/q/w", "x"]) == {"w": "p/q/w"}
    assert matched(["a.w", "b.w"], ["w"]) == {}
    assert matched(["w", "x"], ["p/w", "x"]) == {}
    with pytest.raises(BundleError, match="several prefixes are called like the weights"):
        matched(["w"], ["ema/w", "now/w"])


def test_experts_by_running_counts(tmp_path, mesh_of):
    """Tokens find their places by a cumsum along a symbolic dim; jax writes that as a call."""
    (b,) = jax.export.symbolic_shape("b", constraints=["mod(b, 2) == 0"])
    experts = RNG.normal(size=(4, 8, 8)).astype(np.float32)

    def model(w, experts, x):
        gates = jax.nn.softmax(x @ w)
        chosen = jax.nn.one_hot(gates.argmax(-1), 4, dtype=jnp.int32)
        places = jnp.cumsum(chosen, 0) * chosen - 1
        sent = jax.nn.one_hot(places, x.shape[0] // 2, dtype=x.dtype) * chosen[..., None]
        made = jnp.tanh(jnp.einsum("ecd,edf->ecf", jnp.einsum("nec,nd->ecd", sent, x), experts))
        y = jnp.einsum("nec,ecf->nf", sent * gates[..., None], made)
        noise = jax.random.normal(jax.random.key(0, impl="rbg"), x.shape)
        return y, *jax.lax.approx_max_k(y, 3), jax.lax.cummax(x, 0), noise

    struct = jax.ShapeDtypeStruct((b, 8), W.dtype)
    wrap_stablehlo(
        tmp_path / "b", jax.export.export(jax.jit(model))(W, experts, struct),
        weights={"w": W, "experts": experts}, arg_names=["w", "experts", "x"],
    )  # fmt: skip
    bundle = load_bundle(tmp_path / "b", mesh_of(2), symbols={"b": (8,)})
    x = RNG.normal(size=(8, 8)).astype(np.float32)
    found = BundleInfer(bundle).infer({"x": x})
    for ours, theirs in zip(found.values(), jax.jit(model)(W, experts, x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
