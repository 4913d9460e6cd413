"""Modules of other frameworks as bundles, from Python and from the command line."""

import jax
import jax.export
import numpy as np
import pytest
from safetensors.numpy import save_file

from serving.bundle import wrap
from serving.bundle.function import BundleError
from serving.bundle.read import load_bundle
from serving.bundle.wrap import wrap_stablehlo
from serving.tensor_backend import BundleInfer

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
    with pytest.raises(BundleError) as caught:
        wrap_stablehlo(tmp_path / "b", **{"module": TEXT, "arg_names": ["w", "x", "b"], **given})
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_symbolic_dims_get_their_sizes(tmp_path, mesh_of):
    (b,) = jax.export.symbolic_shape("b")
    structs = jax.ShapeDtypeStruct(W.shape, W.dtype), jax.ShapeDtypeStruct((b, 8), W.dtype)
    exported = jax.export.export(jax.jit(lambda w, x: jax.nn.softmax(x @ w)))(*structs)
    (tmp_path / "m.mlirbc").write_bytes(exported.mlir_module_serialized)
    save_file({"w": W}, tmp_path / "w.safetensors")
    flags = ["--weights", str(tmp_path / "w.safetensors"), "--arg_names", "w,x"]
    flags = [str(tmp_path / "m.mlirbc"), "--out", str(tmp_path / "b"), *flags]
    with pytest.raises(
        SystemExit, match=r"cannot be wrapped: argument arg1 has the shape \(b, 8\)"
    ):
        wrap.main(flags)
    wrap.main([*flags, "--symbols", "b=2"])
    bundle = load_bundle(tmp_path / "b", mesh_of(2))
    np.testing.assert_allclose(bundle.run("main", X)[0], jax.nn.softmax(X @ W), rtol=1e-5)
