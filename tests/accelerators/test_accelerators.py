"""The same on real accelerators: as many as there are, a power of two from two on.

On GPUs:

    SPMD_TEST_PLATFORM=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false pytest -n 8 tests/accelerators
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import spmd
from benchmarks.hlo.collectives import hlo_collectives
from benchmarks.llama_step import train_step
from spmd.models.llama import fresh, sharding
from spmd.models.llama.named import named_config
from tests.accelerators.devices import COUNT, DEVICES
from tests.ir.dialect.cases import CASES, Case, random_spec

# jax hands callbacks arrays of its CPU backend, which JAX_PLATFORMS leaves out here.
ON_ANY_MESH = [case for case in CASES if case.name not in ("mark", "callback")]
"""Cases but the one that marks a value over a mesh of eight devices."""

CHECKED = spmd.Options(check=True)

pytestmark = pytest.mark.skipif(COUNT < 2, reason="one device")


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


def meshes() -> list[spmd.Mesh]:
    sizes = sorted({(COUNT, 1), (COUNT // 2, 2), (1, COUNT)})
    return [spmd.make_mesh(devices=DEVICES[:COUNT], data=d, model=m) for d, m in sizes]


def close(got: Any, want: Any, where: str, rtol: float = 1e-4) -> None:
    def check(a: Any, b: Any) -> None:
        a, b = np.asarray(a), np.asarray(b)
        if np.iscomplexobj(b):  # twice as wide: the absolute value of a finite number is finite
            a, b = a.astype(complex), b.astype(complex)
        scale = float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b))) if b.size else 0.0
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5 + 2e-5 * scale, err_msg=where)

    jax.tree.map(check, got, want)


@pytest.mark.parametrize("case", ON_ANY_MESH, ids=lambda case: case.name)
def test_every_op(case: Case) -> None:
    rng = np.random.RandomState(zlib.crc32(case.name.encode()))
    mesh = meshes()[1 % len(meshes())]
    specs = tuple(random_spec(rng, a.shape, mesh) for a in case.args)
    try:
        want = jax.jit(case.fn)(*case.args)
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        pytest.skip(f"plain jax.jit fails here, too: {str(error).splitlines()[0]}")
    got = spmd.jit(case.fn, mesh=mesh, in_specs=specs, options=CHECKED)(*case.args)
    close(got, want, f"{case.name} on ({mesh}) with specs {specs}")


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize("number", range(3))
def test_llama_steps(number: int, scan: bool) -> None:
    if number >= len(meshes()):
        pytest.skip("two devices have two meshes")
    mesh, optimizer = meshes()[number], optax.adamw(1e-3)
    config = dataclasses.replace(named_config("tiny"), scan_layers=scan)
    params = fresh.init(jax.random.key(0), config)
    tokens = np.random.RandomState(0).randint(0, config.vocab_size, (8, 32)).astype(np.int32)
    batch = {"inputs": tokens, "targets": np.roll(tokens, -1, 1)}
    plain = jax.jit(train_step(config, optimizer))
    ours: Any = spmd.jit(
        train_step(config, optimizer, sharding.activation_marks(mesh, config)), mesh=mesh
    )
    want: Any = (params, optimizer.init(params))
    got: Any = (sharding.mark_params(params, mesh, config), optimizer.init(params))
    for _ in range(3):
        *want, loss = plain(*want, batch)
        *got, found = ours(*got, sharding.mark_batch(batch, mesh))
        np.testing.assert_allclose(found, loss, rtol=1e-5)
    close(got[0], want[0], str(mesh), rtol=1e-3)


def test_the_compiled_program_moves_what_the_plan_says() -> None:
    mesh = meshes()[1 % len(meshes())]

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w["up"]) @ w["down"])

    w = {"up": np.ones((256, 512), np.float32), "down": np.ones((512, 256), np.float32)}
    specs = ({"up": ("data", "model"), "down": ("model", "data")}, ("data", None))
    step = spmd.jit(jax.grad(loss), mesh=mesh, in_specs=specs)
    compiled = step.compile(w, np.ones((64, 256), np.float32))
    planned = sum(c.bytes * c.count for c in compiled.collectives)
    found = sum(c.bytes * c.count for c in hlo_collectives(compiled.as_text("hlo")))
    assert 0 < found <= planned * 1.001


LONG = 4096

SPLIT_DIMS: dict[str, Callable[..., Any]] = {
    "sort": lambda x: jnp.sort(x),
    "argsort": lambda x: jnp.argsort(x),
    "top_k": lambda x: lax.top_k(x, 7),
    "argmax": lambda x: (jnp.argmax(x), jnp.argmin(x)),
    "cumsum": lambda x: jnp.cumsum(x),
    "cummax": lambda x: lax.cummax(x),
    "rolled": lambda x: jnp.concatenate([x[3:], x[:3]]) + jnp.roll(x, -5),
    "uneven": lambda x: jnp.diff(x[: LONG - 3]) * 2,
    "scatter": lambda x: jnp.zeros(LONG).at[(jnp.abs(x) * 997).astype(int) % LONG].add(x),
    "take": lambda x: x[(jnp.abs(x) * 997).astype(int) % LONG],
    "slice": lambda x: lax.dynamic_slice(x, ((jnp.abs(x[0]) * 1e4).astype(int) % 999,), (513,)),
    "convolve": lambda x: jnp.convolve(x, jnp.arange(9.0)),
}


@pytest.mark.parametrize("name", SPLIT_DIMS)
def test_along_a_split_dim(name: str) -> None:
    fn = SPLIT_DIMS[name]
    x = np.random.RandomState(1).randn(LONG).astype(np.float32)
    for mesh in meshes():
        got = spmd.jit(fn, mesh=mesh, in_specs=((("data", "model"),),), options=CHECKED)(x)
        close(got, jax.jit(fn)(x), f"{name} on ({mesh})", rtol=1e-3)


def test_a_manual_region_and_its_collectives() -> None:
    mesh = spmd.make_mesh(devices=DEVICES[:COUNT], x=COUNT)
    where = jax.sharding.Mesh(np.array(DEVICES[:COUNT]), ("x",))
    spec = jax.sharding.PartitionSpec("x")

    def inside(x: Any) -> Any:
        x = lax.psum(x, "x") + lax.ppermute(x, "x", [(i, (i + 1) % COUNT) for i in range(COUNT)])
        return lax.all_to_all(lax.all_gather(x, "x", tiled=True), "x", 0, 0, tiled=True)

    def fn(x: Any) -> Any:
        return jax.shard_map(inside, mesh=where, in_specs=spec, out_specs=spec, check_vma=False)(
            jnp.sin(x)
        )

    x = np.random.RandomState(2).randn(COUNT * COUNT * 4).astype(np.float32)
    close(spmd.jit(fn, mesh=mesh, options=CHECKED)(x), jax.jit(fn)(x), "shard_map")


def test_verify_compares_with_one_device() -> None:
    step = spmd.jit(
        lambda x, w: jax.nn.softmax(x @ w), mesh=meshes()[0], in_specs=(("data", "model"), None)
    )
    args = (np.ones((16, 32), np.float32), np.ones((32, 8), np.float32))
    assert step.compile(*args).verify(*args).ok
