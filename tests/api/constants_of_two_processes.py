"""One of two processes that run a program with a constant; run by `test_constants.py`.

Arguments: port, rank. The last line printed is JSON.
"""

import json
import sys

import jax
import numpy as np

import spmd
from spmd.errors import LaunchError


def main() -> None:
    port, rank = sys.argv[1], int(sys.argv[2])
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    mesh = spmd.make_mesh(data=4)
    table = np.random.default_rng(0).standard_normal((512, 256), np.float32)
    x = spmd.mark_sharding(np.ones((512, 256), np.float32), mesh, ("data", None))
    compiled = spmd.jit(lambda x: (x * table).sum(), mesh=mesh).compile(x)
    is_right = np.allclose(compiled(x), table.sum(), rtol=1e-4)
    (constant,) = compiled.executable.constants
    (piece,) = {shard.data.shape for shard in constant.addressable_shards}
    try:
        spmd.jit(lambda x: (x * (table + rank)).sum(), mesh=mesh)(x)
        differing = "nothing"
    except LaunchError as error:
        differing = next(word for word in ("program hash", "constants") if word in str(error))
    said = {"is_right": bool(is_right), "piece": list(piece), "differing": differing}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
