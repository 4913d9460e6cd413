"""A mesh of which an axis is not used."""

import warnings
from typing import Any

import jax.numpy as jnp
import pytest

import spmd

pytestmark = pytest.mark.usefixtures("devices8")
X = jnp.ones((4, 3))


def twice(x: Any) -> Any:
    return jnp.tanh(x) * 2


def test_an_axis_that_splits_nothing_is_named_once_in_a_warning_and_in_the_summary() -> None:
    mesh = spmd.make_mesh(data=4, model=2)
    with pytest.warns(UserWarning, match="twice: nothing is split over axis model") as found:
        lowered = spmd.jit(twice, mesh=mesh, in_specs=(("data",),)).lower(X)
    assert [warning.filename for warning in found] == [__file__]
    assert "nothing is split over axis model" in lowered.summary()


def test_where_every_axis_is_used_nothing_is_said() -> None:
    mesh = spmd.make_mesh(data=4, unused=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered = spmd.jit(twice, mesh=mesh, in_specs=(("data",),)).lower(X)
    assert "nothing is split" not in lowered.summary()
