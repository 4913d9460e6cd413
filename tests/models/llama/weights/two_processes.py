"""One of two processes that load and save a checkpoint together; run by `test_save.py`.

Arguments: port, rank, folder. The last line printed is a JSON object.
"""

import json
import sys
from pathlib import Path

import jax

from models.llama.config import CONFIGS
from models.llama.sharding import parameter_rules
from models.llama.weights import files as hf_files
from models.llama.weights import load as weights
from models.llama.weights.names import parameters


def main() -> None:
    port, rank, root = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    config = CONFIGS["tiny"]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rules = parameter_rules(config, {"data": 4})
    wanted, treedef = parameters(config)
    shardings = [
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*rules[parameter.path]))
        for parameter in wanted
    ]
    read, count = hf_files.read_slice, [0]

    def counting(file, name, index):
        array = read(file, name, index)
        count[0] += array.nbytes
        return array

    hf_files.read_slice = counting
    params = weights.load(
        root / "original", config, jax.tree_util.tree_unflatten(treedef, shardings)
    )
    weights.save(params, config, root / "exported", max_shard_bytes=30_000)
    failure = ""
    try:
        weights.save(params, config, root / "full")
    except weights.WeightsError as error:
        failure = str(error)
    print(json.dumps({"read": count[0], "failure": failure}))


main()
