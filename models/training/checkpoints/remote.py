"""Saves and restores states on an object store, in the format that orbax has on a disk.

    200/
        state/ocdbt.process_0/   what process 0 wrote
        state/ocdbt.process_1/
        state/                   names all arrays of all processes; then
        meta.json, manifest.json

orbax makes a checkpoint whole by renaming its folder, which object stores cannot do, and of these
it knows `gs://` alone (0.12.8; `s3://` only to read). Here a checkpoint is whole when its manifest
is there: it is written after all else, and removed before all else. What is copied to a disk, orbax
reads. Its format is no public promise: `pyproject.toml` has the releases of which that is tested.
"""

import concurrent.futures
import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp
import tensorstore

from spmd.models.shards import put_shards
from spmd.models.training.checkpoints.found import saved_steps
from spmd.models.training.checkpoints.manifest import MANIFEST, write_part
from spmd.models.training.checkpoints.saving import OWN_FOLDER, TIMEOUT_S, Kept
from spmd.models.training.checkpoints.together import Together
from spmd.models.training.paths import (
    AnyPath,
    StorePath,
    array_driver,
    array_spec,
    kvstore,
    remove_tree,
)

Part = tuple[tuple[slice, ...], npt.NDArray[Any]]
"""Where a shard lies in its array, and the shard."""

TOGETHER_BYTES = 1 << 28
"""So many bytes are written together, and listed together; few large files are quickest."""

READERS = 8
"""So many arrays are read at a time."""

DICT_KEY = 2
"""orbax's number of the kind of a tree's key."""


class StoreManager:
    """Does for a folder on an object store what orbax's manager does for one on a disk.

    Args:
        describe: called on process 0 when all arrays are written; writes the manifest at its end.
    """

    def __init__(
        self, folder: StorePath, keep: Kept, describe: Callable[[], None], together: Together
    ) -> None:
        self.folder, self._keep = folder, keep
        self._describe, self._together = describe, together
        self._rest: Callable[[], None] = lambda: None  # of the save under way

    def save_state(self, step: int, leaves: Mapping[str, Any]) -> None:
        """Copies a state to the host; `finish` writes it."""
        for leaf in leaves.values():
            leaf.copy_to_host_async()
        # Copies of the shards that this process has to write: of equal ones, the first.
        parts = {
            path: [(s.index, np.array(s.data)) for s in leaf.addressable_shards if not s.replica_id]
            for path, leaf in leaves.items()
        }
        shapes = {
            path: (leaf.shape, tuple(max(1, n) for n in leaf.sharding.shard_shape(leaf.shape)))
            for path, leaf in leaves.items()
        }
        self._rest = functools.partial(self._write, step, parts, shapes)

    def finish(self) -> None:
        """Writes what is to be saved; it is called on a thread of its own."""
        rest, self._rest = self._rest, lambda: None
        rest()

    def _write(
        self, step: int, parts: Mapping[str, Sequence[Part]], shapes: Mapping[str, Any]
    ) -> None:
        folder, process = self.folder / str(step), jax.process_index()
        if process == 0:
            remove_tree(folder, MANIFEST)
        self._wait("begun")
        state = folder / "state"
        own = state / f"{OWN_FOLDER}{process}"
        _write_parts(own, parts, shapes)
        write_part(state, own.rglob("*"), process)
        self._wait("written")
        if process == 0:
            _merge(state, jax.process_count())
            _name_arrays(folder, shapes)
            self._describe()
            with contextlib.suppress(OSError):  # the next save tries again
                steps = saved_steps(self.folder)[::-1]
                for old, is_kept in zip(steps, self._keep.of(steps), strict=True):
                    if not is_kept:
                        remove_tree(self.folder / str(old), MANIFEST)
        self._wait("whole")

    def _wait(self, point: str) -> None:
        self._together.wait(key=point, timeout_ms=TIMEOUT_S * 1000)

    def restore_state(self, step: int, structs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Reads arrays in the shardings of structs; each process what its devices hold, once."""
        state = self.folder / str(step) / "state"
        driver, context = array_driver(state), _context()

        def read(path: str, struct: Any) -> jax.Array:
            spec = array_spec(state, path.replace("/", "."), driver)
            stored = tensorstore.open(spec, context=context).result()
            return put_shards(
                struct.shape,
                struct.dtype,
                struct.sharding,
                lambda index: np.asarray(stored[index].read().result()).astype(struct.dtype),
                lambda nbytes: None,
            )

        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            return dict(zip(structs, pool.map(read, structs, structs.values()), strict=True))

    def reload(self) -> None:
        """Nothing is remembered of what the folder holds."""

    def close(self) -> None:
        """Nothing is open."""


# Writing


def _write_parts(
    own: AnyPath, parts: Mapping[str, Sequence[Part]], shapes: Mapping[str, Any]
) -> None:
    """Writes shards; of the arrays that this process has no shard of, nothing."""
    context = _context()
    group, waiting = tensorstore.Transaction(), 0
    for path, blocks in parts.items():
        shape, chunk = shapes[path]
        for index, block in blocks:
            metadata = {
                "shape": list(shape),
                "chunks": list(chunk),
                "compressor": {"id": "zstd", "level": 1},
            }
            spec = array_spec(own, path.replace("/", "."), "zarr")
            spec |= {"dtype": block.dtype.name, "metadata": metadata, "create": True, "open": True}
            array = tensorstore.open(spec, context=context, transaction=group).result()
            array[index].write(block).result()
            waiting += block.nbytes
            if waiting >= TOGETHER_BYTES:
                group.commit_async().result()
                group, waiting = tensorstore.Transaction(), 0
    group.commit_async().result()


def _merge(state: AnyPath, processes: int) -> None:
    """Names the arrays of all processes in one place; their bytes stay where they are."""
    # A copy that copies no bytes needs both ends in one context.
    context, done = _context(), tensorstore.Transaction(atomic=True)
    whole = _opened_store(state, context)
    for process in range(processes):
        part = _opened_store(state / f"{OWN_FOLDER}{process}", context)
        part.experimental_copy_range_to(whole.with_transaction(done)).result()
    done.commit_async().result()


def _opened_store(folder: AnyPath, context: Any) -> Any:
    spec = {"driver": "ocdbt", "base": kvstore(folder)}
    return tensorstore.KvStore.open(spec, context=context).result()


def _name_arrays(folder: AnyPath, shapes: Mapping[str, Any]) -> None:
    """Writes what orbax wants to know of the tree of arrays."""
    tree = {}
    for path, (_, chunk) in shapes.items():
        keys = path.split("/")
        tree[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": DICT_KEY} for key in keys],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": list(chunk),
            },
        }
    about = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (folder / "state" / "_METADATA").write_text(json.dumps(about))
    handler = f"{ocp.PyTreeCheckpointHandler.__module__}.{ocp.PyTreeCheckpointHandler.__qualname__}"
    handlers = {"item_handlers": {"state": handler}, "metrics": {}, "performance_metrics": {}}
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(handlers))


# tensorstore


def _context() -> Any:
    return tensorstore.Context({"cache_pool": {"total_bytes_limit": 1 << 26}})
