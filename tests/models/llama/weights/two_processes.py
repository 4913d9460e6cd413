"""One of two processes that load and save a checkpoint together; run by `test_save.py`.

Arguments: port, rank, folder. The last line printed is a JSON object.
"""

import json
import sys
from pathlib import Path

import jax

from models.llama.named import CONFIGS
from models.llama.sharding import parameter_rules
from models.llama.weights import load as weights
from models.llama.weights.names import parameters
from tests.two_processes import record_reads


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
    reads = record_reads()
    params = weights.load(
        root / "original", config, jax.tree_util.tree_unflatten(treedef, shardings)
    )
    weights.save(params, config, root / "exported", max_shard_bytes=30_000)
    failure = ""
    try:
        weights.save(params, config, root / "full")
    except weights.WeightsError as error:
        failure = str(error)
    print(json.dumps({"read": sum(nbytes for _, _, nbytes in reads), "failure": failure}))


main()
