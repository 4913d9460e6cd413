"""A second start on real accelerators: kernels come from the first one's cache, Mosaic's on Hopper.

See `test_attention.py` for the command.
"""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp

from spmd.ops import linears
from spmd.serving.bundle.function import Function
from spmd.serving.bundle.write import write_bundle
from tests.accelerators.devices import PLATFORM

START = """
import sys, jax, numpy as np, spmd
from spmd.serving.bundle.read import load_bundle
mesh = spmd.make_mesh(x=1, devices=jax.devices()[:1])
bundle = load_bundle(sys.argv[1], mesh, cache_dir=sys.argv[2])
print(float(np.asarray(bundle.run("f", np.ones((64, 4096), "bfloat16"))).astype("float32").sum()))
"""


def test_a_second_start_runs_the_kernels_of_the_first(tmp_path: Path) -> None:
    weights = {name: jnp.full((512, 4096), 2.0**-12, jnp.bfloat16) for name in "ab"}

    def f(weights, x):
        return sum(linears(x, [weights["a"], weights["b"]]))

    x = jnp.ones((64, 4096), jnp.bfloat16)
    function = Function("f", f, (weights, x), ("weights", "x"), ("weights", "input"))
    platform = "cuda" if PLATFORM == "gpu" else PLATFORM
    write_bundle(tmp_path / "bundle", [function], weights=weights, platforms=(platform,))
    for _ in range(2):
        command = [sys.executable, "-c", START, f"{tmp_path}/bundle", f"{tmp_path}/cache"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert run.returncode == 0, run.stderr
        assert float(run.stdout) == 64 * 512 * 2
        assert "Symbols not found" not in run.stderr
