"""What mypy says of programs of users: nothing of right ones; where wrong ones are wrong, that."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RIGHT = """
from collections.abc import Mapping
from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax.sharding import NamedSharding, PartitionSpec

import spmd

optimizer = optax.adamw(1e-3)
Params = dict[str, jax.Array]


class Batch(NamedTuple):
    x: jax.Array
    y: jax.Array


def train_step(params: Params, opt_state: Any, batch: Batch) -> tuple[Params, Any, jax.Array]:
    def loss_fn(params: Params) -> jax.Array:
        hidden = jax.nn.relu(batch.x @ params["w_in"])
        return jnp.mean((hidden @ params["w_out"] - batch.y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return params, opt_state, loss


def normal(*shape: int) -> npt.NDArray[np.float32]:
    return np.ones(shape, np.float32)


mesh = spmd.make_mesh(data=4, model=2)
axes = {"data": 4, "model": 2}
mesh = spmd.make_mesh(**axes)
mesh = spmd.make_mesh((4, 2), ("data", "model"), topology="v5e-8")
params = {
    "w_in": spmd.mark_sharding(normal(256, 1024) / 16, mesh, ("data", "model")),
    "w_out": spmd.mark_sharding(normal(1024, 256) / 32, mesh, PartitionSpec("model", "data")),
}
assert_type(params, dict[str, jax.Array])
assert_type(spmd.mark_tree({"w": normal(2)}, mesh, {"w": ("data", None)}), dict[str, jax.Array])
assert_type(spmd.mark_tree(params, mesh, {"w*": "data"}), dict[str, jax.Array])
assert_type(spmd.mark_tree({"a": {"w": normal(2)}}, mesh, {"*": ()}), dict[str, Any])
batch = Batch(spmd.mark_sharding(normal(4096, 256), mesh, ("data", None)), jnp.ones((4096, 256)))
assert_type(spmd.mark_tree(batch, mesh, {"x": ("data",)}), Batch)
struct = spmd.mark_sharding(jax.ShapeDtypeStruct((8,), jnp.float32), mesh, ("data",))
assert_type(struct, jax.ShapeDtypeStruct)
assert_type(spmd.mark_sharding(1.0, mesh, ()), jax.Array)

step = spmd.jit(train_step, mesh=mesh, donate_argnums=(0, 1))
compiled = step.compile(params, jax.eval_shape(optimizer.init, params), batch, topology="v5e-8")
assert_type(compiled, spmd.Compiled)
opt_state = compiled.init(1, optimizer.init, params)
params, opt_state, loss = step(params, opt_state, batch)
assert_type(loss, jax.Array)

split = NamedSharding(mesh, PartitionSpec("data"))


@spmd.jit(mesh=mesh, in_shardings=(split,), static_argnames="n")
def double(x: jax.Array, n: int = 2) -> jax.Array:
    return spmd.mark_sharding(x * n, mesh, ("data", ...))


@spmd.jit
def plain(x: jax.Array) -> jax.Array:
    return x


assert_type(plain(double(batch.x, n=3)), jax.Array)
jax.set_mesh(mesh)
"""

WRONG = """
import jax
import numpy as np

import spmd

mesh = spmd.make_mesh(data=4, model=2)
x = np.ones((8, 8), np.float32)


def step(x: jax.Array) -> jax.Array:
    return x


spmd.jit(step, mesh=mesh, donate_argnum=0)  # wrong
spmd.jit(step, mesh=mesh, donate_argnums="x")  # wrong
spmd.jit(step, mesh={"data": 4})  # wrong
spmd.jit(mesh=mesh, options={"planner": "greedy"})  # wrong
spmd.jit(step, mesh=mesh)("no array")  # wrong
spmd.jit(step, mesh=mesh)(spmd.mark_sharding(x, mesh, ("data",)), rate=2.0)  # wrong
spmd.mark_sharding(x, ("data", None), mesh)  # wrong
spmd.mark_sharding({"w": x}, mesh, ("data",))  # wrong
spmd.mark_sharding(x, mesh, {"w": ("data",)})  # wrong
spmd.mark_tree({"w": x}, mesh, ("data",))  # wrong
spmd.make_mesh(data="4")  # wrong
spmd.mark_sharding(x, mesh, ()).astype(float).data  # wrong
"""


@pytest.mark.thorough
@pytest.mark.slow("mypy reads jax, and all of spmd")
def test_right_programs_pass_and_wrong_ones_do_not(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    for name, text in (("right", RIGHT), ("wrong", WRONG)):
        (tmp_path / f"{name}.py").write_text(text)
    flags = ["--strict", "--follow-imports=silent", "--no-error-summary", "--hide-error-context"]
    # No config of whoever runs this; and what jax and optax leave untyped is not ours to say.
    flags += [
        "--config-file=",
        "--untyped-calls-exclude=jax",
        "--disable-error-code=import-untyped",
    ]
    cache = f"--cache-dir={ROOT / '.mypy_cache' / 'users'}"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, cache, "right.py", "wrong.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    places = re.findall(r"^(\w+).py:(\d+): error", done.stdout, re.MULTILINE)
    lines = WRONG.splitlines()
    wrong = {str(n) for n, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert {n for name, n in places if name == "right"} == set(), done.stdout + done.stderr
    assert {n for name, n in places if name == "wrong"} == wrong, done.stdout + done.stderr
