"""Every dtype that jax has arrays of, given and returned in every way, beside `jax.jit`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from spmd.lowering.expand import NOT_OF_NCCL

# Of GPUs there are two or four.
SIZES = next(s for s in ((3, 2), (2, 2), (2, 1), (1, 1)) if s[0] * s[1] <= jax.device_count())
MESH = spmd.Mesh(None, SIZES, ("a", "b"))
SHAPES = ((6, 4), (6, 1), (0, 4), (6, 0), ())
CHECKED = spmd.Options(check=True)


def _all_dtypes() -> list[str]:
    """Those of jax.numpy's scalar types that this backend can hold, 64-bit ones if they are on."""
    scalars = [x for x in vars(jnp).values() if isinstance(x, type(jnp.float32))]
    names = sorted({jax.dtypes.canonicalize_dtype(x).name for x in scalars})
    # jax has names for them, but XLA no arrays on CPUs: of floats of 6 bits it ends the process.
    return [
        name for name in names if name not in ("uint1", "int1", "float6_e2m3fn", "float6_e3m2fn")
    ]


DTYPES = _all_dtypes()
NARROW = [name for name in DTYPES if name.startswith(("int2", "int4", "uint2", "uint4", "float4"))]


def _value(dtype: str, shape: tuple[int, ...]) -> Any:
    numbers = np.arange(int(np.prod(shape))) * 7 % 11 % 3 - (dtype[0] in "ifc")
    return jnp.asarray(numbers.reshape(shape).astype(jnp.dtype(dtype)))


def _values(dtypes: list[str], shapes: Any = SHAPES[:1]) -> dict[str, Any]:
    return {f"{d} {s}": _value(d, s) for d in dtypes for s in shapes}


def _keys() -> dict[str, Any]:
    keys = {k: jax.random.split(jax.random.key(1, impl=k), (6, 4)) for k in ("threefry2x32", "rbg")}
    return keys | {f"{kind} of none": key[:0] for kind, key in keys.items()}


def _spec(x: Any) -> Any:
    fits = [n % size == 0 for n, size in zip(x.shape, SIZES, strict=False)]
    return tuple(axis if fit else None for axis, fit in zip("ab", fits, strict=False))


def program(mark: Callable[..., Any]) -> Callable[..., Any]:
    def each(x: Any) -> Any:
        turned = x[::-1].T if x.ndim else x
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        doubled = x if is_key or x.dtype == bool else x + x
        return mark(turned, (None, "a") if x.ndim else ()), doubled

    return lambda tree: jax.tree.map(each, tree)


def _mark(x: Any, spec: Any) -> Any:
    return spmd.mark_sharding(x, MESH, spec)


PLAIN, MARKED = program(lambda x, _: x), program(_mark)


def same(got: Any, want: Any) -> None:
    pairs, structure = jax.tree_util.tree_flatten_with_path(want)
    leaves = jax.tree.leaves(got)
    assert len(leaves) == len(pairs), structure
    for leaf, (path, wanted) in zip(leaves, pairs, strict=True):
        name = jax.tree_util.keystr(path)
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype), name
        if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            leaf, wanted = map(jax.random.key_data, (leaf, wanted))
        arrays = [np.asarray(x) for x in (leaf, wanted)]
        if wanted.dtype.name in NARROW:  # of whose bytes numpy reads a part
            arrays = [x.astype(np.float32) for x in arrays]
        # Bytes: numpy finds NaN in those that have no zero.
        assert arrays[0].tobytes() == arrays[1].tobytes(), name


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    return _values(DTYPES, SHAPES)


@pytest.fixture(scope="module")
def wanted(given: dict[str, Any]) -> Any:
    return jax.jit(PLAIN)(given)


@pytest.fixture(scope="module")
def step(given: dict[str, Any]) -> Any:
    return spmd.jit(MARKED, mesh=MESH, in_specs=(jax.tree.map(_spec, given),), options=CHECKED)


def test_there_are_packed_and_float8_dtypes() -> None:
    assert len(NARROW) >= 4
    assert sum(name.startswith("float8") for name in DTYPES) >= 5


def test_called(step: Any, given: Any, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    same(step(given), wanted)
    monkeypatch.setattr(step, "_compiled", None)  # the second call needs none of our code
    same(step(given), wanted)


def test_compiled_ahead_and_of_host_arrays(step: Any, given: Any, wanted: Any) -> None:
    compiled = step.compile(given)
    same(compiled(given), wanted)
    same(compiled(jax.tree.map(np.asarray, given)), wanted)
    assert compiled.verify(given)


def test_fed_back_and_donated(given: Any) -> None:
    def turned(tree: Any) -> Any:
        return jax.tree.map(lambda pair: pair[1], PLAIN(tree), is_leaf=lambda x: type(x) is tuple)

    step = spmd.jit(turned, mesh=MESH, in_specs=(jax.tree.map(_spec, given),), donate_argnums=0)
    got, want = step(jax.tree.map(jnp.copy, given)), jax.jit(turned)(given)
    same(step(got), jax.jit(turned)(want))


def test_exported(step: Any, given: Any, wanted: Any) -> None:
    exported = step.lower(given).export()
    same(exported.call(jax.device_put(given, step.compile(given).in_shardings[0])), wanted)


def test_exported_with_a_symbolic_dim() -> None:
    given = _values(DTYPES)
    rows = export.symbolic_shape("n", constraints=["mod(n, 3) == 0"])[0]
    structs = {n: jax.ShapeDtypeStruct((rows, 4), x.dtype) for n, x in given.items()}
    called = export.export(jax.jit(PLAIN))(structs).call
    run = spmd.jit(called, mesh=MESH, in_specs=(jax.tree.map(_spec, given),))
    same(run(given), jax.jit(PLAIN)(given))
    text = run.lower(given).stages.emitted.module
    sent = {line for line in text.splitlines() if '"stablehlo.all_gather"' in line}
    assert len(sent) == len(given)
    assert not [line for line in sent for name in NOT_OF_NCCL if f"x{name}>" in line]


def test_looked_at_while_it_runs() -> None:
    given = _values(DTYPES, ((6, 4), (0, 4)))
    seen: dict[str, Any] = {}

    def looking(tree: Any) -> Any:
        jax.debug.callback(lambda values: seen.update(jax.tree.map(np.asarray, values)), tree)
        return MARKED(tree)

    same(spmd.jit(looking, mesh=MESH)(given), jax.jit(PLAIN)(given))
    jax.effects_barrier()
    same(seen, given)


def test_keys() -> None:
    keys = _keys()
    step = spmd.jit(MARKED, mesh=MESH, in_specs=(jax.tree.map(_spec, keys),), options=CHECKED)
    want = jax.jit(PLAIN)(keys)
    same(step(keys), want)
    same(step.compile(keys)(keys), want)
    with pytest.raises(spmd.SpmdError, match=r"jax\.random\.key_data"):
        step.lower(keys).export()


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_packed_elements_in_another_order_in_memory(donated: tuple[int, ...]) -> None:
    x = _value("int4", (6, 4))
    where = NamedSharding(jax.make_mesh(SIZES, ("a", "b")), PartitionSpec("a", "b"))
    step = spmd.jit(PLAIN, mesh=MESH, in_specs=(("a", "b"),), donate_argnums=donated)
    compiled = step.compile(x)
    for run in (compiled, step):
        placed = jax.device_put(np.asarray(x), Format(Layout((1, 0)), where))
        same(run(placed), jax.jit(PLAIN)(x))


def test_a_large_constant_of_packed_elements_is_split() -> None:
    table = np.random.RandomState(0).randint(-8, 8, (768, 512)).astype(jnp.int4)

    def product(x: Any) -> Any:
        return x @ jnp.asarray(table).astype(jnp.float32)

    x = np.ones((6, 768), np.float32)
    compiled = spmd.jit(product, mesh=MESH, in_specs=((None, ("a", "b")),)).compile(x)
    assert [any(c.sharding.dims) for c in compiled.stages.emitted.constants] == [True]
    np.testing.assert_allclose(compiled(x), jax.jit(product)(x))
