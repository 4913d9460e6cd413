"""Several threads that compile at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp

import spmd


def test_each_thread_takes_the_mesh_of_its_own_marks() -> None:
    first, second = spmd.make_mesh(a=8), spmd.make_mesh(b=4, c=2)
    is_tracing, other_is_done = threading.Event(), threading.Event()

    def slow(x: Any) -> Any:
        is_tracing.set()
        assert other_is_done.wait(60)
        return spmd.mark_sharding(x * 2, first, ("a",))

    def quick(x: Any) -> Any:
        return spmd.mark_sharding(x * 3, second, ("b",))

    with ThreadPoolExecutor(1) as pool:
        lowering = pool.submit(lambda: spmd.jit(slow).lower(jnp.ones(8)).mesh)
        assert is_tracing.wait(60)
        assert spmd.jit(quick).lower(jnp.ones(8)).mesh == second
        other_is_done.set()
        assert lowering.result() == first
