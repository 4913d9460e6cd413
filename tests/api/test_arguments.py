"""What is told from the types and names of arguments alone."""

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.api.arguments import arg_specs, donated_leaves, like_parameters, updates_of

W = jax.ShapeDtypeStruct((4, 2), jnp.float32)
B = jax.ShapeDtypeStruct((4,), jnp.float32)


@pytest.mark.parametrize(
    ("donated", "links"),
    [
        ((), ()),
        ((0,), ((1, 0), (2, 1))),  # the whole tree follows the scalar among the results
        ((2,), ((3, 2),)),  # static argument 1 is not there
        ((0, 2), ((1, 0), (2, 1), (3, 2))),
    ],
)
def test_updates_are_results_of_the_same_type(donated: tuple[int, ...], links: object) -> None:
    params = {"b": B, "w": W}
    results = (jax.ShapeDtypeStruct((), jnp.float32), params, W)
    jitted = spmd.jit(lambda p, n, w: p, static_argnums=1, donate_argnums=donated)
    parts = jitted.recipe.arguments((params, "static", W), {})
    assert updates_of(parts, results) == links
    leaves = {0: (0, 1), 2: (2,)}
    assert donated_leaves(parts) == tuple(leaf for number in donated for leaf in leaves[number])


def test_arguments_by_name_have_the_place_of_their_parameter_and_a_result_updates_one() -> None:
    jitted = spmd.jit(lambda a, b, *, c: a, donate_argnames="c")
    parts = jitted.recipe.arguments((W,), {"c": B, "b": W})
    found = [(part.key, part.name, part.is_donated) for part in parts]
    assert found == [(0, "a", False), ("b", "b", False), ("c", "c", True)]
    specs = arg_specs(("x", "y"), parts, jitted.recipe.parameters, 1)
    assert specs == ["x", "y", None]
    parts = spmd.jit(lambda a, b: a, donate_argnums=(0, 1)).recipe.arguments((W, W), {})
    assert updates_of(parts, W) == ((0, 0),)


def test_state_lies_like_the_parameter_at_the_end_of_its_path() -> None:
    names = ("params/w", "params/b", "state/0/mu/w", "state/0/nu/b", "state/count", "x")
    shapes = [(4, 2), (4,), (4, 2), (2,), (), (4, 2)]
    entries = [(("data",), ()), (("data",),), None, None, None, None]
    filled, reasons = like_parameters(names, shapes, entries)
    assert filled == (entries[0], entries[1], entries[0], None, None, None)
    assert reasons == (None, None, "like argument params/w", None, None, None)
