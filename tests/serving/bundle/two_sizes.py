"""One of two processes that load a bundle whose size memory decides; run by `test_symbols.py`.

Arguments: port, rank, folder of the bundle. The last line printed is JSON.
"""

import dataclasses
import json
import sys

import jax

import spmd
from serving.bundle.read import load_bundle
from spmd.mesh.chips import CHIPS


def main() -> None:
    port, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    chip = dataclasses.replace(CHIPS["cpu"], hbm_bytes=16 << 20)
    options = spmd.Options(topology=spmd.Topology("cpu:4", chip))
    mesh = spmd.make_mesh(data=2, model=2)
    share = (0.5, 0.25)[rank]  # as if one had less left
    bundle = load_bundle(folder, mesh, options=options, memory_share=share)
    peak = max(program.emitted.peak_bytes or 0 for program in bundle.programs.values())
    print(json.dumps({"symbols": bundle.symbols, "peak": peak}))


if __name__ == "__main__":
    main()
