"""The page about kernels of one's own, run: its C++ is compiled, its Python executed."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import sparse
from jax.sharding import PartitionSpec as P

import spmd
from spmd.mesh.spec import jax_mesh
from tests.close import partitioned
from tests.lowering.manual_programs import manual
from tests.markdown import ROOT, blocks_of

PAGE = ROOT / "docs" / "custom_calls.md"


def block(language: str, number: int = 0) -> str:
    blocks = blocks_of(PAGE.read_text(encoding="utf-8"))
    return [block.text for block in blocks if block.language == language][number]


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the page's kernel is built, with the page's command."""
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "rms_norm.cc").write_text(block("cpp"), encoding="utf-8")
    command = block("sh").replace("python", sys.executable)
    subprocess.run(["sh", "-c", command], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.thorough
@needs_compiler
def test_the_page_runs(
    built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(built)
    names: dict[str, Any] = {}
    exec(compile(block("python"), str(PAGE), "exec"), names)
    assert "all_gather" in capsys.readouterr().out

    compiled = names["step"].compile(names["x"], names["w"])
    assert [c.axes for c in compiled.collectives] == [("model",)]
    text = compiled.as_text("local")
    assert "(tensor<16x16xf32>) -> tensor<16x16xf32>" in text, "each device has its own rows"
    rows = names["x"] @ names["w"]
    want = 2 * rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(compiled(names["x"], names["w"]), want, rtol=1e-4, atol=1e-4)


def test_the_composite_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(block("python", 1), str(PAGE), "exec"), names)
    assert "my.rms_norm" in capsys.readouterr().out
    args = names["x"], names["w"], names["scale"]
    assert names["step"].compile(*args).verify(*args)
    there = names["step"].lower(*args, topology=spmd.Topology("v5e:2x4"))
    assert "tpu_custom_call" in there.as_text("emitted")
    small = names["step"].lower(args[0][:8], *args[1:], topology=spmd.Topology("v5e:2x4"))
    assert "tpu_custom_call" not in small.as_text("emitted")


@needs_compiler
def test_in_a_manual_region_no_rule_is_needed(built: Path) -> None:
    """Kernels written for one device stay as they are; with a free axis they need a rule."""
    library = ctypes.cdll.LoadLibrary(str(built / "rms_norm.so"))
    handler = jax.ffi.pycapsule(library.RmsNormHandler)
    jax.ffi.register_ffi_target("rms_norm_alone", handler, platform="cpu")
    mesh = spmd.make_mesh(x=4, y=2)

    def body(x: Any) -> Any:
        call = jax.ffi.ffi_call("rms_norm_alone", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return call(x, eps=np.float32(0))

    x = np.random.default_rng(0).standard_normal((8, 16), np.float32)
    whole = manual(jax_mesh(mesh), body, P("x", "y"), P("x", "y"), whole=True)
    step = spmd.jit(whole, mesh=mesh, options=spmd.Options(check=True))
    halves = x.reshape(8, 2, 8)
    want = halves / np.sqrt((halves**2).mean(-1, keepdims=True))
    np.testing.assert_allclose(step(x), want.reshape(8, 16), rtol=1e-4, atol=1e-5)

    part = manual(jax_mesh(mesh), body, P("x"), P("x"))
    with pytest.raises(spmd.UnsupportedOpError, match=r"no sharding rule for op .*rms_norm_alone"):
        spmd.jit(part, mesh=mesh).lower(x)


def test_products_of_sparse_rows(mesh: spmd.Mesh) -> None:
    """jax's own kernel of BCSR: columns of the dense operand are split, and terms of it flow on."""
    random = np.random.default_rng(0)
    dense = np.where(random.random((24, 32)) < 0.2, random.standard_normal((24, 32)), 0)
    matrix = sparse.BCSR.fromdense(dense.astype(np.float32))
    x = random.standard_normal((32, 16), np.float32)

    def fn(matrix: Any, x: Any, w: Any) -> Any:
        return matrix @ x, matrix @ x[:, 0], matrix @ (x @ w)

    specs = (None, (None, "data"), ("data", None))
    compiled = partitioned(fn, matrix, x, x[:16], mesh=mesh, in_specs=specs)
    assert "tensor<32x4xf32>) -> tensor<24x4xf32>" in compiled.as_text("local")


def test_memory_that_nobody_wrote_to() -> None:
    """`jax.lax.empty` is a call on TPUs."""

    def fn(x: Any) -> Any:
        return jax.lax.empty(x.shape, x.dtype).at[:].set(x)

    step = spmd.jit(fn, mesh=spmd.make_mesh(data=8), in_specs=(("data",),))
    there = step.lower(np.ones(16, np.float32), topology=spmd.Topology("v5e:2x4"))
    assert "AllocateBuffer" in there.as_text("stablehlo")
    assert "AllocateBuffer" not in there.as_text("program")
