"""One of two processes that run a bundle together; run by `test_bundle.py`.

Arguments: port, rank, folder of the bundle, folder for the cache. The last line printed is JSON.
"""

import json
import sys

import jax
import numpy as np

import spmd
from serving.bundle.function import BundleError
from serving.bundle.read import load_bundle
from tests.two_processes import record_reads


def main() -> None:
    port, rank, folder, cache = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    reads = record_reads()
    mesh = spmd.make_mesh(data=2, model=2)
    bundle = load_bundle(folder, mesh, cache_dir=cache)
    x = np.arange(32, dtype=np.float32).reshape(4, 8) / 32
    made = [bundle.run("step", x * number)["y"] for number in range(3)]
    try:
        load_bundle(f"{folder}-damaged", mesh)
        failure = ""
    except BundleError as error:
        failure = str(error)
    read = sum(nbytes for _, _, nbytes in reads)
    print(json.dumps({"y": np.asarray(made[-1]).tolist(), "read": read, "failure": failure}))


if __name__ == "__main__":
    main()
