"""How orbax is set up here, and the thread that waits for a save."""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from spmd.models.training.checkpoints import tables
from spmd.models.training.checkpoints.found import first_line
from spmd.models.training.checkpoints.manifest import write_part
from spmd.models.training.checkpoints.pieces import Pieces, PiecesHandler
from spmd.models.training.checkpoints.together import Together

OWN_FOLDER = "ocdbt.process_"
"""How the folder of a process begins in which orbax keeps what that process writes."""

SHARED_BYTES = 2**20
"""Of arrays that several devices hold, parts of at least this size are written by several
processes. For smaller ones it is not worth compiling the program that slices them."""

TIMEOUT_S = 4 * 3600
"""The most seconds that a save may take. Dead processes are noticed much sooner, by their peers."""


class HashingHandler(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]
    """Writes arrays as orbax does; each process then hashes the files that it wrote itself.

    Process 0 alone would have to read the whole checkpoint.
    """

    async def serialize(
        self,
        values: Sequence[jax.Array],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
    ) -> Sequence[Any]:
        """The writes under way, which end when what was written is hashed."""
        written = await super().serialize(values, infos, args)
        return [_Hashed(written, infos[0])] if infos else written


class _Hashed:
    """Waits for writes, then hashes what they have left."""

    def __init__(self, written: Sequence[Any], info: ocp.type_handlers.ParamInfo) -> None:
        self._written, self._info = written, info

    def result(self, timeout: float | None = None) -> None:
        """Returns when all is done; `timeout` holds for each write."""
        for write in self._written:
            write.result(timeout)
        process, folder = jax.process_index(), Path(self._info.parent_dir)
        write_part(folder, (folder / f"{OWN_FOLDER}{process}").rglob("*"), process)

    def cancel(self) -> None:
        for write in self._written:
            write.cancel()


class DiskManager(ocp.CheckpointManager):  # type: ignore[misc]
    """Orbax's manager, without its own check for SIGTERM.

    It asks jax on process 0 alone whether the job is to stop. jax counts these questions on all
    processes to agree on a step, so asking on one of them would make the processes disagree.
    """

    def reached_preemption(self, step: int) -> bool:
        """Whether to stop: never."""
        del step
        return False

    def save_state(self, step: int, leaves: Mapping[str, Any]) -> None:
        """Begins to save leaves by path; returns when they may be donated."""
        state = ocp.args.PyTreeSave(tables.nested(leaves))
        self.save(step, args=ocp.args.Composite(state=state), force=True)

    def restore_state(self, step: int, structs: Mapping[str, Any]) -> dict[str, Any]:
        """Reads leaves by path, in the shardings of structs."""
        tree = tables.nested(structs)
        how = ocp.checkpoint_utils.construct_restore_args(tree)
        state = ocp.args.PyTreeRestore(tree, restore_args=how)
        return tables.by_path(self.restore(step, args=ocp.args.Composite(state=state))["state"])

    def finish(self) -> None:
        """Waits for the save under way; raises what it failed with."""
        self.wait_until_finished()
        self.check_for_errors()


@dataclasses.dataclass
class Kept:
    """Which checkpoints are kept; a policy of orbax."""

    last: int  # so many of the latest
    every: int  # those of every n-th step; 0 is none
    best: int | None = None  # that of this step

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """For each checkpoint, the latest last, whether it is kept."""
        del context
        return self.of([checkpoint.step for checkpoint in checkpoints])

    def of(self, steps: Sequence[int]) -> list[bool]:
        """For each step, the latest last, whether its checkpoint is kept."""
        return [
            index + self.last >= len(steps)
            or bool(self.every and step % self.every == 0)
            or step == self.best
            for index, step in enumerate(steps)
        ]


def open_manager(
    folder: Path, kept: Kept, describe: Callable[[], None], together: Together, *, pieces: bool
) -> DiskManager:
    """Opens orbax's manager of a folder of checkpoints.

    Args:
        describe: called on process 0 when all arrays are on the disk and before the checkpoint
            gets its name. What it adds to the folder is therefore part of the checkpoint.
        pieces: whether `Pieces` are to be saved; their folder has to exist before they are read.
    """
    options = ocp.CheckpointManagerOptions(
        preservation_policy=kept,
        save_root_metadata=False,
        lightweight_initialize=True,
        async_options=ocp.AsyncOptions(
            post_finalization_callback=describe,
            create_directories_asynchronously=not pieces,
            timeout_secs=TIMEOUT_S,
            barrier_sync_fn=together.wait,
        ),
    )
    arrays = HashingHandler(min_slice_bytes_for_replica_parallel=SHARED_BYTES)
    handlers = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (Pieces, PiecesHandler())
    )
    state = ocp.PyTreeCheckpointHandler(type_handler_registry=handlers)
    return DiskManager(folder, options=options, item_handlers={"state": state})


class Saving(threading.Thread):
    """A save in progress: the thread, once started, waits for its end.

    Args:
        meta: what `meta.json` will hold.
        started: when it was begun, by `time.perf_counter`.
        finish: waits for the end, and raises what it failed with.

    Attributes:
        stall: seconds for which training waited.
        ended: when it ended; 0 before that.
        error: why it failed; None as long as it has not.
    """

    def __init__(
        self,
        step: int,
        meta: Mapping[str, Any],
        started: float,
        finish: Callable[[], None],
        together: Together,
    ) -> None:
        super().__init__(name="saving", daemon=True)
        self.step, self.meta, self._finish, self._together = step, meta, finish, together
        self.started, self.stall, self.ended = started, 0.0, 0.0
        self.error: Exception | None = None

    def run(self) -> None:
        """Waits, and tells the other processes if it failed."""
        try:
            if self.error is None:
                self._finish()
        except Exception as error:
            self.error = error
        if self.error is not None:
            self._together.fail(first_line(self.error))
        self.ended = time.perf_counter()
