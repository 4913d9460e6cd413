# mypy: disable-error-code="call-overload"
"""What is done wrong at first: one clear error with the place, what is there and the fix."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.mesh.spec import jax_mesh

# Without their types, which would refuse much of this.
jit: Any = spmd.jit
mark_sharding: Any = spmd.mark_sharding

W, X = jnp.ones((16, 32)), jnp.ones((8, 16))
STRUCT = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def dense(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def double(x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * 2, x)


def without_rule(x: Any) -> Any:
    return jax.ffi.ffi_call("nobody_wrote_this", jax.ShapeDtypeStruct((8, 4), jnp.float32))(x)


class Wrong(NamedTuple):
    """A wrong use, on a mesh of data=4, model=2, and the error that it raises.

    Attributes:
      parts: what the message says.
      is_placed: whether it says the line of this file that is wrong.
    """

    name: str
    error: type[spmd.SpmdError]
    run: Callable[[spmd.Mesh], Any]
    parts: tuple[str, ...]
    is_placed: bool = True


def marked(t: Any, *spec: Any) -> Callable[[spmd.Mesh], Any]:
    return lambda mesh: mark_sharding(t, mesh, spec)


def called(fn: Any, *args: Any, **given: Any) -> Callable[[spmd.Mesh], Any]:
    return lambda mesh: spmd.jit(fn, mesh=mesh, **given)(*args)


def marked_for_another_mesh(mesh: spmd.Mesh) -> Any:
    other = spmd.Mesh(range(7, -1, -1), (2, 4), ("data", "model"))
    return spmd.jit(lambda x: spmd.mark_sharding(x * 2, other, ("data",)), mesh=mesh)(X)


def argument_on_another_mesh(mesh: spmd.Mesh) -> Any:
    return spmd.jit(double, mesh=mesh)(spmd.mark_sharding(X, spmd.make_mesh(x=4), ("x",)))


def donated_twice(mesh: spmd.Mesh) -> Any:
    step = spmd.jit(double, mesh=mesh, donate_argnums=0)
    x = spmd.mark_sharding(jnp.ones((8, 16)), mesh, ("data",))
    step(x)
    return step(x)


def compiled_for_another_shape(mesh: spmd.Mesh) -> Any:
    return spmd.jit(dense, mesh=mesh).compile(X, W)(jnp.ones((16, 16)), W)


MARKS = [
    Wrong("an axis misspelt", spmd.SpecError, marked(W, "dat", "model"),
          ("unknown axis 'dat'", "'data', 'model'", "fix: use 'data'")),
    Wrong("an axis with two letters swapped", spmd.SpecError, marked(W, "dtaa"),
          ("fix: use 'data'",)),
    Wrong("an axis twice", spmd.SpecError, marked(W, "data", "data"),
          ("axis 'data' is used twice", "spec ('data', 'data')")),
    Wrong("a spec that is too long", spmd.SpecError, marked(jnp.ones(8), "data", "model"),
          ("is for 2 dims, and the tensor has 1 dim", "drop 1")),
    Wrong("a dim that does not divide", spmd.SpecError, marked(jnp.ones((6, 8)), "data"),
          ("dim 0 of a tensor of shape (6, 8) has size 6, which data=4 does not divide",
           "6 / 4 leaves 2", "pad the dim to 8")),
    Wrong("a struct's dim that does not divide", spmd.SpecError, marked(STRUCT, None, ("data", 0)),
          ("axis 'data' is used twice",)),
    Wrong("nothing marked", spmd.SpecError, marked(None, "data"), ("None is not a tensor",)),
    Wrong("a text marked", spmd.SpecError, marked("w", "data"), ("'w' is not a tensor",)),
    Wrong("an array as the mesh", spmd.MeshError, lambda mesh: mark_sharding(W, X, ("data",)),
          ("a float32 array of shape (8, 16) is not a mesh",), is_placed=False),
    Wrong("a sharding as the spec", spmd.SpecError,
          lambda mesh: mark_sharding(W, mesh, NamedSharding(jax_mesh(mesh), P("data"))),
          ("a NamedSharding stands where the spec", "pass its spec: P('data',)")),
    Wrong("a pattern that matches nothing", spmd.SpecError,
          lambda mesh: spmd.mark_tree({"a": X}, mesh, {"b*": ("data",)}),
          ("'b*' matches no leaf", "there are a")),
]  # fmt: skip

MESHES = [
    Wrong("too many devices", spmd.MeshError, lambda _: spmd.make_mesh(data=64),
          ("needs 64 devices", "--xla_force_host_platform_device_count=64"), is_placed=False),
    Wrong("a size to be inferred", spmd.MeshError, lambda _: spmd.make_mesh(data=-1, model=2),
          ("axis 'data' has size -1", "write the size out"), is_placed=False),
    Wrong("sizes without names", spmd.MeshError, lambda _: spmd.make_mesh((4, 2)),
          ("one keyword for each axis", "make_mesh((4, 2), ('data', 'model'))"), is_placed=False),
    Wrong("a mark for another mesh", spmd.MeshError, marked_for_another_mesh,
          ("two different meshes", "(data=2, model=4)", "(data=4, model=2)")),
    Wrong("an argument on another mesh", spmd.MeshError, argument_on_another_mesh,
          ("two different meshes", "argument x lies on the mesh (x=4)", "(data=4, model=2)")),
]  # fmt: skip

SPECS = [
    Wrong("an axis misspelt in in_specs", spmd.SpecError,
          called(double, X, in_specs=(("dta", None),)),
          ("unknown axis 'dta' in the spec of argument x", "fix: use 'data'")),
    Wrong("shardings under two names", spmd.ArgumentError,
          lambda mesh: spmd.jit(double, mesh=mesh, in_specs=((),), in_shardings=((),)),
          ("in_specs and in_shardings", "leave one of them out")),
    Wrong("an inner function's argument in host memory", spmd.SpecError,
          lambda mesh: spmd.jit(spmd.jit(double, mesh=mesh, in_specs=(
              NamedSharding(jax_mesh(mesh), P(), memory_kind="pinned_host"),)), mesh=mesh)(X),
          ("inside of another one", "of the outer function")),
    Wrong("an argument that does not divide", spmd.SpecError,
          called(double, np.ones(6, np.float32), in_specs=(("data",),)),
          ("dim 0 of argument x has size 6, which data=4 does not divide",)),
    Wrong("a result that does not divide", spmd.SpecError,
          called(lambda x: {"y": x[:6]}, X, out_specs={"y": ("data",)}),
          ("dim 0 of result y has size 6, which data=4 does not divide",)),
    Wrong("too few in_specs", spmd.SpecError, called(dense, X, W, in_specs=(("data",),)),
          ("one entry for each positional argument", "2, for x, w", "None")),
    Wrong("a spec that is no tuple of specs", spmd.SpecError,
          called(double, X, in_specs=("data", None)), ("in_specs=(('data', None),)",)),
    Wrong("specs of other keys", spmd.SpecError, called(double, {"w": X}, in_specs=({"v": ()},)),
          ("specs of argument x don't match", "specs for v, which it does not have",
           "no spec for w")),
    Wrong("specs of a tuple inside a result", spmd.SpecError,
          called(lambda x: {"y": (x, x)}, X, out_specs={"y": ("data", None)}),
          ("the result can be read in two ways", "(P('data'), None) for each")),
]  # fmt: skip

CALLS = [
    Wrong("a text as an argument", spmd.ArgumentError, called(lambda x, mode: x, X, "fast"),
          ("argument mode of type str is not an array", "static_argnums")),
    Wrong("other keys than compiled for", spmd.ArgumentError,
          lambda mesh: spmd.jit(double, mesh=mesh).compile({"a": X})({"b": X}),
          ("another structure",), is_placed=False),
    Wrong("another shape than compiled for", spmd.ArgumentError, compiled_for_another_shape,
          ("argument x", "shape (16, 16)", "shape (8, 16)")),
    Wrong("donated twice", spmd.ArgumentError, donated_twice,
          ("argument x was deleted", "params = step(params)")),
    Wrong("a stage misspelt", spmd.ArgumentError,
          lambda mesh: spmd.jit(double, mesh=mesh).lower(X).as_text("stablehl"),
          ("unknown stage 'stablehl'", "write 'stablehlo'"), is_placed=False),
    Wrong("a kernel without a rule", spmd.UnsupportedOpError, called(without_rule, X),
          ("no sharding rule for op custom_call:nobody_wrote_this", "tensor<8x4xf32>",
           "(without_rule)", "register")),
]  # fmt: skip


@pytest.mark.parametrize("wrong", [*MARKS, *MESHES, *SPECS, *CALLS], ids=lambda wrong: wrong.name)
def test_one_error_says_what_where_and_the_fix(devices8: Any, wrong: Wrong) -> None:
    with pytest.raises(wrong.error) as caught:
        wrong.run(spmd.make_mesh(data=4, model=2))
    text = str(caught.value)
    for part in wrong.parts:
        assert part in text
    assert text.count("\n  fix: ") == 1, text
    placed = re.search(r"\n  at: .*test_newcomers.py:\d+ \(", text)
    assert bool(placed) == wrong.is_placed, text


@pytest.mark.parametrize(
    ("specs", "want"),
    [
        (("data", "model"), [P("data", None), P("model", None)]),
        ((P("data", "model"), ()), [P("data", "model"), P(None, None)]),
        (P("data", "model"), [P("data", "model"), P("data", "model")]),
    ],
)
def test_specs_of_several_results_can_be_told_apart(specs: Any, want: Any, mesh: spmd.Mesh) -> None:
    """The outermost tuple of results has one spec for each, as jax has it."""
    lowered = spmd.jit(lambda x: (x, x + 1), mesh=mesh, out_specs=specs).compile(X)
    assert [sharding.spec for sharding in lowered.out_shardings] == want
