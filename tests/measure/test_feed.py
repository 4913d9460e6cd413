"""What a program that takes its arguments over is given, step after step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.measure.profile import Feed

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers")


@pytest.fixture
def mesh(devices8: Any) -> Any:
    return spmd.make_mesh(data=8)


def feed_of(fn: Any, mesh: Any, *args: Any, **kwargs: Any) -> tuple[Feed, list[Any]]:
    compiled = spmd.jit(fn, mesh=mesh, donate_argnums=(0, 1), **kwargs).compile(*args)
    given = [jax.device_put(a, s) for a, s in zip(args, compiled.in_shardings, strict=True)]
    return Feed(compiled.executable, given, compiled.donated, compiled.request.links), given


def test_updates_go_on_and_what_was_given_stays(mesh: Any) -> None:
    # Of the two donated arguments one has an update: the other is copied for each step.
    feed, given = feed_of(
        lambda x, y, z: (x + y.sum() + z, y.sum()), mesh, *map(jnp.ones, (8, 4, 8))
    )
    seen = []
    for _ in range(3):
        arguments = feed.prepare()
        seen.append([float(a[0]) for a in arguments])
        feed.run(arguments)
    assert seen == [[1, 1, 1], [6, 1, 1], [11, 1, 1]]
    for argument, size in zip(given, (8, 4, 8), strict=True):
        np.testing.assert_array_equal(argument, np.ones(size))


def test_an_update_that_lies_elsewhere_is_not_given_back(mesh: Any) -> None:
    specs = {"in_specs": ("data", None), "out_specs": ((None,), (None,))}
    feed, given = feed_of(lambda x, y: (x + 1, y * 2), mesh, jnp.ones(8), jnp.ones(8), **specs)
    for _ in range(2):
        arguments = feed.prepare()
        assert float(arguments[0][0]) == 1
        assert arguments[0].sharding == given[0].sharding
        feed.run(arguments)
