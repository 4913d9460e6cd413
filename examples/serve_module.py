"""A function exported as StableHLO, as any framework may write it, compiled for a mesh."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.export
import numpy as np

import spmd


def predict(w_in, w_out, x):
    return jax.nn.softmax(jax.nn.relu(x @ w_in) @ w_out)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32) / 16


# Whoever exports knows no mesh, and jax.export's bytes may as well be a file of another framework.
arguments = normal(0, 256, 1024), normal(1, 1024, 64), normal(2, 32, 256)
module = jax.export.export(jax.jit(predict))(*arguments).mlir_module_serialized

# Whoever serves knows no Python of the model: arguments have the names that the module gives them.
mesh = spmd.make_mesh(data=2, model=4)
specs = {"w_in": (None, "model"), "w_out": ("model", None), "x": ("data", None)}
compiled = spmd.compile_stablehlo(module, mesh, arg_specs=specs)
(y,) = compiled(*arguments)

np.testing.assert_allclose(y, jax.jit(predict)(*arguments), rtol=1e-5)
print(f"{y.shape} split over {y.sharding.spec}, as jax.jit computes it")
for c in compiled.collectives:
    print(f"{c.kind} over {', '.join(c.axes)}: {c.bytes:,} bytes\n    {c.reason}")
