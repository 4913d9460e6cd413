"""Lowers a program with a folder for plans, and says what came of it; run by test_kept_plans."""

import hashlib
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp

import spmd


def read_or_planned(folder: str) -> dict[str, Any]:
    """Whether the plan was read, and a digest of what was emitted."""
    mesh = spmd.Mesh(None, (4, 2), ("data", "model"))
    w = spmd.mark_sharding(jax.ShapeDtypeStruct((64, 64), jnp.float32), mesh, ("data", "model"))
    options = spmd.Options(cache_dir=folder)
    stages = spmd.jit(lambda w: jnp.tanh(w @ w).sum(), mesh=mesh, options=options).lower(w).stages
    digest = hashlib.sha256(stages.emitted.module.encode()).hexdigest()
    return {"is_read": stages.is_read, "digest": digest}


if __name__ == "__main__":
    print(json.dumps(read_or_planned(sys.argv[1])))
