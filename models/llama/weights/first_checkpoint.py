"""Turns weights into the first checkpoint of a training run: step 0, from which training goes on.

It has parameters only. Fresh optimizer state is mostly zeros: saving it would triple the size, and
would fix the optimizer, its options and a dtype before anyone has chosen them. The run makes it.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import spmd
from spmd.models.llama import fresh, sharding
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.weights.files import Array, Index, WeightsError
from spmd.models.llama.weights.names import Parameter, parameters
from spmd.models.llama.weights.save import appearing, check_can_save
from spmd.models.llama.weights.tensors import Source, Tensor
from spmd.models.progress import Advance, bytes_bar
from spmd.models.training.checkpoints.found import CheckpointError
from spmd.models.training.checkpoints.pieces import Pieces
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.paths import AnyPath
from spmd.models.training.run.description import RunFolder
from spmd.models.training.run.loop import TrainState

FIRST_STEP = 0


def write_run(
    source: Source,
    folder: str | Path,
    mesh: Mapping[str, int],
    *,
    table: str = "2d",
    scan_layers: bool = True,
    dtype: str | None = None,
    console: Console | None = None,
) -> AnyPath:
    """Writes the folder of a training run that has weights and has taken no step.

    A run can go on from it with any mesh, optimizer and dtype, and with layers stacked or unrolled.
    The arguments say for which of these restoring is quickest. A few chunks of a tensor are in
    memory at a time. The folder appears when it is complete.

    Args:
        folder: new or empty.
        mesh: axis -> size; each array is stored in the pieces that these devices hold.
        table: name of the specs by which arrays are split.
        dtype: what to convert to; None keeps every tensor's bits.

    Returns:
        The folder of the checkpoint.

    Raises:
        WeightsError: the folder is not empty, an axis is unknown, or layers cannot be stacked.
        ConfigError: there is no such table.
        CheckpointError: the checkpoint cannot be written, or tensors cannot be read.
    """
    source = source.astype(dtype)
    config = dataclasses.replace(source.config, scan_layers=scan_layers)
    structs = _marked(config, mesh, table)
    check_can_save(folder)
    # What a run may not choose; `param_dtype` is set when the run starts.
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=dict))
    del plain["param_dtype"]
    about = {"config": {"model": plain}, "weights": source.about}
    total = sum(tensor.nbytes for tensor in source.tensors.values())
    with bytes_bar("writing", total, console) as advance:
        # Arrays are read while they are written.
        wanted, treedef = parameters(config)
        leaves = [
            _piecewise(one, struct, [source.tensors[name] for name in one.names], advance)
            for one, struct in zip(wanted, treedef.flatten_up_to(structs), strict=True)
        ]
        params = jax.tree.unflatten(treedef, leaves)
        with appearing(Path(folder)) as unfinished:
            try:
                made = RunFolder(unfinished).checkpoints
                with Checkpoints(made, about=about, pieces=True) as checkpoints:
                    checkpoints.save(TrainState(params, None, FIRST_STEP))
                    checkpoints.finish()
            except CheckpointError as error:
                raise CheckpointError(f"{folder} cannot be written: {error}") from error
    return RunFolder(Path(folder)).checkpoints / str(FIRST_STEP)


def _marked(config: LlamaConfig, mesh: Mapping[str, int], table: str) -> Any:
    """Structs of the parameters with their shardings, over a mesh that needs no devices."""
    unknown = [axis for axis in mesh if axis not in sharding.MESH_AXES]
    if unknown:
        raise WeightsError(
            f"--mesh: no axis is called {unknown[0]!r}; the model splits over "
            f"{', '.join(sharding.MESH_AXES)}"
        )
    structs = jax.eval_shape(functools.partial(fresh.init, config=config), jax.random.key(0))
    devices = spmd.Mesh(None, tuple(mesh.values()), tuple(mesh))
    return sharding.mark_params(structs, devices, config, sharding.table_named(table))


def _piecewise(
    parameter: Parameter, struct: jax.ShapeDtypeStruct, rows: Sequence[Tensor], advance: Advance
) -> Pieces:
    """One parameter as `Pieces`; a chunk has one layer of a stacked one, and one expert."""
    dtypes = sorted({row.dtype for row in rows})
    if len(dtypes) > 1:
        raise WeightsError(
            f"layers are stacked, and {parameter.path} is {' and '.join(dtypes)} in different "
            "ones; give --noscan or a --dtype"
        )
    by_name = dict(zip(parameter.names, rows, strict=True))
    assert struct.sharding is not None
    piece = struct.sharding.shard_shape(parameter.shape)

    def read(index: Index) -> Array:
        block = parameter.read(index, dtypes[0], lambda name, part: by_name[name][part])
        advance(block.nbytes)
        return block

    stored = (*(1,) * parameter.leading, *piece[parameter.leading :])
    return Pieces(parameter.shape, dtypes[0], struct.sharding, stored, read)
