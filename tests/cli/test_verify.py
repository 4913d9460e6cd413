"""`spmd verify`: a StableHLO file, partitioned, beside itself on one device."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd.cli import verify
from spmd.cli.main import main
from spmd.ir.types import TensorType, numpy_dtype

ROOT = Path(__file__).parents[2]

MODULE = """
func.func @main(%x: tensor<8x4xf32>, %i: tensor<4xi32>, %p: tensor<4xi1>) -> tensor<8x4xf32> {
  %f = stablehlo.convert %i : (tensor<4xi32>) -> tensor<4xf32>
  %z = stablehlo.select %p, %f, %f : tensor<4xi1>, tensor<4xf32>
  %b = stablehlo.broadcast_in_dim %z, dims = [1] : (tensor<4xf32>) -> tensor<8x4xf32>
  %y = stablehlo.multiply %x, %b : tensor<8x4xf32>
  return %y : tensor<8x4xf32>
}"""


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spmd.cli.main", "verify", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.thorough
def test_the_script(tmp_path: Path) -> None:
    path = tmp_path / "model.mlir"
    path.write_text(MODULE)
    found = run_script(str(path), "--mesh=data=4,model=2", "--arg_spec=0=data,model", "--seed=1")
    assert found.returncode == 0, found.stderr
    assert "1 results agree" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "required: module"),
        (("missing.mlir",), "no file"),
        (("missing.mlir", "--mesh=data=0"), "'data=0' is not of the form"),
    ],
)
def test_it_says_what_is_wrong(arguments: tuple[str, ...], words: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        sys.exit(main(["verify", *arguments]))
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i32", "ui8", "i1", "complex<f32>", "f8E4M3FN"])
def test_random_arguments(dtype: str) -> None:
    made = verify.random_argument(TensorType((8, 8), dtype), np.random.default_rng(0), 5)
    assert made.shape == (8, 8)
    assert made.dtype == numpy_dtype(dtype)
    if dtype in ("i32", "ui8"):
        assert set(np.unique(made)) <= set(range(5))
