"""Converts weights to another layout on disk, with bounded memory; can be stopped and continued.

Files are written one after the other, into a folder with a temporary name. If the same command is
run again after a stop, complete files are kept. The folder gets its name when all are complete.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import spmd
from spmd.models.llama import fresh, sharding
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.weights import files, stacked
from spmd.models.llama.weights.config import to_hf
from spmd.models.llama.weights.names import Parameter, parameters
from spmd.models.llama.weights.ranks import SHARDING_FILE, cuts, describe, rank_file, shard
from spmd.models.llama.weights.save import MAX_SHARD_BYTES, appearing, check_can_save, write_beside
from spmd.models.llama.weights.tensors import Source, Tensor
from spmd.models.progress import Advance, bytes_bar
from spmd.models.training.checkpoints.found import CheckpointError
from spmd.models.training.checkpoints.pieces import Pieces
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.paths import AnyPath
from spmd.models.training.run.description import RunFolder
from spmd.models.training.run.loop import TrainState

# The first checkpoint of a training run: step 0, from which training goes on.
#
# It has parameters only. Fresh optimizer state is mostly zeros: saving it would triple the size,
# and would fix the optimizer, its options and a dtype before anyone has chosen them. The run makes
# it.

FIRST_STEP = 0


def write_run(
    source: Source,
    folder: str | Path,
    mesh: Mapping[str, int],
    *,
    table: str = "2d",
    scan_layers: bool = True,
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

    Returns:
        The folder of the checkpoint.

    Raises:
        WeightsError: the folder is not empty, an axis is unknown, or layers cannot be stacked.
        ConfigError: there is no such table.
        CheckpointError: the checkpoint cannot be written, or tensors cannot be read.
    """
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
        raise files.WeightsError(
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
        raise files.WeightsError(
            f"layers are stacked, and {parameter.path} is {' and '.join(dtypes)} in different "
            "ones; give --noscan or a --dtype"
        )
    by_name = dict(zip(parameter.names, rows, strict=True))
    assert struct.sharding is not None
    piece = struct.sharding.shard_shape(parameter.shape)

    def read(index: files.Index) -> files.Array:
        block = parameter.read(index, dtypes[0], lambda name, part: by_name[name][part])
        advance(block.nbytes)
        return block

    stored = (*(1,) * parameter.leading, *piece[parameter.leading :])
    return Pieces(parameter.shape, dtypes[0], struct.sharding, stored, read)


PROGRESS_FILE = "progress.json"

Plan = Mapping[str, Sequence[Tensor]]
"""File name -> the tensors in it, in order."""


def write_hf(
    source: Source,
    folder: str | Path,
    *,
    max_file_bytes: int = MAX_SHARD_BYTES,
    console: Console | None = None,
) -> None:
    """Writes all tensors, unsplit, as a folder that transformers loads.

    Args:
      folder: new or empty.
      max_file_bytes: the most bytes of tensors in one file.

    Raises:
      WeightsError: the folder cannot be written, or tensors cannot be read.
      ConfigError: transformers does not support the model.
    """
    if source.config.model_type in stacked.FAMILIES:
        source = dataclasses.replace(source, tensors=_joined(source.tensors))
    entries = [_entry(tensor) for tensor in source.tensors.values()]
    named = files.plan_files(entries, max_file_bytes)
    plan = {file: [source.tensors[e.name] for e in group] for file, group in named.items()}
    beside = {} if len(plan) == 1 else {files.INDEX_FILE: files.file_index(named)}
    _write(source, Path(folder), plan, beside, console)


def write_ranks(
    source: Source,
    folder: str | Path,
    ranks: int,
    *,
    console: Console | None = None,
) -> None:
    """Writes one file for each rank of a tensor-parallel group, with its shards; see `ranks.py`.

    Args:
      folder: new or empty.

    Raises:
      WeightsError: as for `write_hf`; or the model cannot be divided among so many ranks.
    """
    split = cuts(source.config, ranks)
    plan = {
        rank_file(rank): [shard(t, split[name], rank) for name, t in source.tensors.items()]
        for rank in range(ranks)
    }
    _write(source, Path(folder), plan, {SHARDING_FILE: describe(source, ranks)}, console)


def _joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of gpt-oss' files."""
    whole = {name: (tensor.shape, tensor.__array__) for name, tensor in tensors.items()}
    dtype = next(iter(tensors.values())).dtype

    def part(read: Callable[[], files.Array], index: files.Index) -> files.Array:
        return read()[index]

    return {
        name: tensors.get(name) or Tensor(name, shape, dtype, functools.partial(part, read))
        for name, (shape, read) in stacked.joined(whole).items()
    }


def _entry(tensor: Tensor) -> files.TensorEntry:
    return files.TensorEntry(tensor.name, tensor.shape, tensor.dtype)


def _write(
    source: Source,
    folder: Path,
    plan: Plan,
    beside: Mapping[str, Mapping[str, Any]],
    console: Console | None,
) -> None:
    folder = folder.absolute()
    check_can_save(folder)
    dtype = next(iter(source.tensors.values())).dtype
    identity = _identity(source, plan)
    with _unfinished(folder, identity) as (unfinished, done):
        noted = unfinished / f"{PROGRESS_FILE}.part"
        total = sum(t.nbytes for group in plan.values() for t in group)
        with bytes_bar("writing", total, console) as advance:
            for name, tensors in plan.items():
                if name in done:
                    advance(sum(tensor.nbytes for tensor in tensors))
                    continue
                _write_file(unfinished, name, tensors, advance)
                done.append(name)
                files.write_json(noted, {"identity": identity, "done": done})
                noted.rename(unfinished / PROGRESS_FILE)
        for name, content in beside.items():
            files.write_json(unfinished / name, content)
        write_beside(unfinished, to_hf(source.config, dtype), source.tokenizer_from)
        (unfinished / PROGRESS_FILE).unlink()
        unfinished.rename(folder)


def _write_file(unfinished: Path, name: str, tensors: Sequence[Tensor], advance: Advance) -> None:
    """Writes a file that appears when it is complete, with one tensor in memory at a time."""

    def arrays() -> Iterator[files.Array]:
        for tensor in tensors:
            array = tensor.__array__()
            yield array
            advance(array.nbytes)
            del array

    partial = f"{name}.part"
    files.write_files(unfinished, {partial: [_entry(tensor) for tensor in tensors]}, arrays())
    (unfinished / partial).rename(unfinished / name)


# Going on


def _identity(source: Source, plan: Plan) -> str:
    """A digest of everything that decides the result: only the same conversion may be continued."""
    content = {
        "source": [source.about, *source.stamps],
        "files": {file: [repr(_entry(t)) for t in group] for file, group in plan.items()},
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@contextlib.contextmanager
def _unfinished(folder: Path, identity: str) -> Iterator[tuple[Path, list[str]]]:
    """The folder to write to, and the files in it that an earlier run completed."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        unfinished.mkdir(exist_ok=True)
        lock = os.open(unfinished, os.O_RDONLY)
    except OSError as error:
        raise files.WeightsError(f"{unfinished} cannot be made: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        done = _done(unfinished, identity)
        for path in unfinished.iterdir():
            if path.name not in (*done, PROGRESS_FILE):
                path.unlink()
        yield unfinished, done
    except BlockingIOError:
        raise files.WeightsError(f"another process is writing {folder}; wait for it") from None
    except OSError as error:
        raise files.WeightsError(f"{folder} cannot be written: {error}") from error
    finally:
        os.close(lock)


def _done(unfinished: Path, identity: str) -> list[str]:
    """The files that are complete, if the run that wrote them had the same identity."""
    try:
        content = json.loads((unfinished / PROGRESS_FILE).read_text(encoding="utf-8"))
        names = [str(name) for name in content["done"]] if content["identity"] == identity else []
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [name for name in names if (unfinished / name).is_file()]
