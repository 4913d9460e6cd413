"""`jax.Ref`s as arguments and closed over: what they hold afterwards is as under `jax.jit`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.mesh.spec import jax_mesh

X = np.random.default_rng(0).standard_normal((16, 8), np.float32)

Jit = Callable[[Callable[..., Any]], Callable[..., Any]]
Program = Callable[[Jit, Any], Any]


def passed(jit: Jit, place: Any) -> Any:
    """Two calls: the second one finds the ref where the first one left it."""
    count, total = jax.new_ref(jnp.zeros((), jnp.int32)), jax.new_ref(place(np.zeros_like(X)))

    def fn(refs: dict[str, Any], x: Any) -> Any:
        refs["count"][...] += 1
        refs["total"][1:] += x[1:]
        return refs["total"][...].sum()

    step = jit(fn)
    returned = [step({"count": count, "total": total}, place(X)) for _ in range(2)]
    return returned, count[...], total[...]


def closed_over(jit: Jit, place: Any) -> Any:
    """In the function, in a loop, and in another function that it calls."""
    total, last = jax.new_ref(jnp.zeros(())), jax.new_ref(place(np.ones_like(X)))

    @jax.jit
    def note(x: Any) -> Any:
        last[...] = x * last[0, 0]

    def fn(x: Any) -> Any:
        def body(i: Any, y: Any) -> Any:
            total[...] += y.sum()
            return y * 2

        note(x)
        return jax.lax.fori_loop(0, 3, body, x)

    return jit(fn)(place(X)), total[...], last[...]


def both(jit: Jit, place: Any) -> Any:
    """One is only read, one is only written, and one is made inside."""
    read, written = jax.new_ref(place(X)), jax.new_ref(place(np.zeros_like(X)))

    def fn(written: Any) -> None:
        inside = jax.new_ref(jnp.zeros(X.shape))
        inside[...] += read[...]
        written[...] = inside[...] * 2

    jit(fn)(written)
    return read[...], written[...]


def keys(jit: Jit, place: Any) -> Any:
    state = jax.new_ref(jax.random.key(0))

    def fn(state: Any, x: Any) -> Any:
        state[...], used = jax.random.split(state[...])
        return x + jax.random.normal(used, x.shape)

    return jit(fn)(state, place(X)), jax.random.key_data(state[...])


@pytest.mark.parametrize("program", [passed, closed_over, both, keys])
def test_refs_hold_what_they_do_under_jax_jit(program: Program, mesh: spmd.Mesh) -> None:
    def on_mesh(x: Any) -> Any:
        return jax.device_put(x, NamedSharding(jax_mesh(mesh), P("data")))

    ours = program(lambda fn: spmd.jit(fn, mesh=mesh), on_mesh)
    theirs = program(jax.jit, jnp.asarray)
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_ref_stays_where_it_lies_and_in_its_memory(mesh: spmd.Mesh) -> None:
    sharding = NamedSharding(jax_mesh(mesh), P("model", "data"))
    ref, before = jax.new_ref(jax.device_put(X, sharding)), X.copy()

    def fn(ref: Any, x: Any) -> Any:
        ref[...] *= 2
        return x @ ref[...].T

    step = spmd.jit(fn, mesh=mesh)
    compiled = step.compile(ref, X)
    step(ref, X)
    compiled(ref, X)
    assert ref.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(ref[...], before * 4)
    assert step._cache_size() == 1
    assert compiled.out_info.shape == (16, 16)
    assert len(jax.tree.leaves(compiled.out_shardings)) == 1
    assert compiled.donated == (0,), "its memory is taken over"
    assert compiled.verify(ref, X)
    compiled.measure(ref, X, steps=1)
    np.testing.assert_array_equal(ref[...], before * 4)


def test_what_jax_refuses(mesh: spmd.Mesh) -> None:
    def fn(one: Any, two: Any) -> None:
        one[...] += two[...]

    refs = [jax.new_ref(jnp.ones(8)) for _ in range(2)]
    step = spmd.jit(fn, mesh=mesh)
    step(*refs)
    with pytest.raises(spmd.SpmdError, match=r"one jax\.Ref is given as argument one and"):
        step(refs[0], refs[0])
    step(refs[0], jax.new_ref(refs[0][...]))  # what the error says
    assert refs[0][0] == 4
    with pytest.raises(spmd.SpmdError, match="float0 or refs cannot be exported"):
        step.lower(*refs).export()


def test_inside_other_programs(mesh: spmd.Mesh) -> None:
    ref = jax.new_ref(jax.device_put(np.zeros_like(X), NamedSharding(jax_mesh(mesh), P("data"))))

    def add(ref: Any, x: Any) -> None:
        ref[...] += x

    inner = spmd.jit(add, mesh=mesh, in_specs=(("data", None), ("data", None)))
    jax.jit(lambda x: inner(ref, x))(X)
    np.testing.assert_array_equal(ref[...], X)
