"""FFTs of several dims: planned one dim at a time, and one op again where nothing is exchanged."""

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from tests.close import partitioned

GPUS = spmd.Topology("h200:8")
SHAPE = (16, 8, 24)

CASES = {
    "fft2": lambda x: jnp.fft.fft2(x + 1j),
    "ifft2": lambda x: jnp.fft.ifft2(x + 1j * x[::-1]),
    "rfft2": jnp.fft.rfft2,
    "irfft2": lambda x: jnp.fft.irfft2(x + 1j * x[::-1]),
    "fftn": jnp.fft.fftn,
    "rfftn": jnp.fft.rfftn,
    "irfftn": lambda x: jnp.fft.irfftn(x + 1j * x[::-1], s=(16, 8, 30)),
    "gradient of rfft2": jax.grad(lambda x: jnp.abs(jnp.fft.rfft2(x)).sum()),
    "gradient of irfftn": jax.grad(lambda x: (jnp.fft.irfftn(x * (1 + 2j)) ** 3).sum()),
}


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        pytest.param(name, dim, marks=() if dim == number % 3 else pytest.mark.heavy)
        for number, name in enumerate(CASES)
        for dim in range(3)
    ],
)
def test_values_are_those_of_one_device(name: str, dim: int) -> None:
    fn, mesh = CASES[name], spmd.make_mesh(x=8)
    x = np.random.RandomState(0).randn(*SHAPE).astype(np.float32)
    spec = tuple("x" if d == dim else None for d in range(3))
    partitioned(fn, x, mesh=mesh, in_specs=(spec,))


@pytest.mark.parametrize("out", [None, (None, "x")])
def test_split_rows_are_exchanged_between_the_dims(out: Any) -> None:
    mesh = spmd.make_mesh(x=8)
    x = spmd.mark_sharding(jax.ShapeDtypeStruct((8192, 8192), jnp.complex64), mesh, ("x", None))
    lowered = spmd.jit(jnp.fft.fft2, mesh=mesh, out_specs=out).lower(x, topology=GPUS)
    (exchange,) = lowered.collectives
    assert (exchange.kind, exchange.bytes) == ("all_to_all", 7 * 8192 * 8192 // 8)


@pytest.mark.parametrize(
    ("name", "devices"), [(name, (1, 8)[number % 2]) for number, name in enumerate(CASES)]
)
def test_where_nothing_is_exchanged_they_stay_one(name: str, devices: int) -> None:
    """Whole on one device, or one of a batch on each: as jax had written them.

    Those that make real values stay apart: cuFFT takes all of their dims for symmetric. jax makes
    such values symmetric itself since 0.11, and writes one op.
    """
    fn, mesh = CASES[name], spmd.Mesh(None, (devices,), ("x",))
    fn = jax.vmap(fn)
    x = spmd.mark_sharding(jax.ShapeDtypeStruct((8, *SHAPE), jnp.float32), mesh, ("x",))
    lowered = spmd.jit(fn, mesh=mesh).lower(x, topology=spmd.Topology(f"h200:{devices}"))
    found = [op for op in lowered.stages.optimized.program.walk() if op.name == "stablehlo.fft"]
    lengths = [list(op.kind.attrs["fft_length"]) for op in found]
    wanted: list[list[int]] = []
    text = lowered.as_text("stablehlo")
    for kind, stated in re.findall(r"type = +(\w+), length = (\[.*?\])", text):
        whole = json.loads(stated)
        wanted += [[length] for length in whole] if kind == "IRFFT" else [whole]
    assert wanted
    assert sorted(lengths) == sorted(wanted)
