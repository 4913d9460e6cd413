"""Calls Python from a program over two processes, and says who was called and what was raised.

Arguments: a port, and the process.
"""

import json
import os
import sys

import jax
import numpy as np
from jax.experimental import io_callback

import spmd

X = np.ones((8, 4), np.float32)
SAME = jax.ShapeDtypeStruct(X.shape, X.dtype)
called: list[float] = []


def double(x):
    called.append(float(np.asarray(x).sum()))
    return np.asarray(x) * 2


def fails(x):
    raise ValueError("this is what went wrong")


def step(x):
    jax.debug.callback(lambda x: None, x)
    x = io_callback(double, SAME, x, ordered=True)

    def again(x, _):
        return io_callback(double, SAME, x, ordered=True), None

    return jax.lax.scan(again, x, None, length=2)[0].sum()


def failing(x):
    return jax.pure_callback(fails, SAME, x).sum()


def main(port, rank):
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
    mesh = spmd.make_mesh(data=4)
    run, fail = (spmd.jit(f, mesh=mesh, in_specs=(("data",),)) for f in (step, failing))
    results = [float(run(X)) for _ in range(2)]
    jax.effects_barrier()
    raised = ""
    try:
        jax.block_until_ready(fail(X))
    except RuntimeError as error:
        raised = str(error)
    print(json.dumps({"called": called, "results": results, "raised": raised}), flush=True)
    os._exit(0)  # jax would raise once more


if __name__ == "__main__":
    main(*sys.argv[1:])
