"""Checkpoints of a training run: saved in the background, all or nothing, restored on any mesh.

    checkpoints/
        200/
            meta.json        step, config, data, mesh; shape, dtype and spec of every array
            manifest.json    size and hash of every file
            state/           parameters and optimizer state, written by orbax

While a checkpoint is written, its folder is called `200.orbax-checkpoint-tmp...`. Renaming it to
`200` is the last thing that happens, so a folder with a plain number was complete once. Whether it
has been damaged since, `manifest.json` tells. On an object store there is no renaming, and the
manifest, which is written last, says that all is there (`remote.py`). Restoring reads only each
device's part of each array.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

import jax

from models.training.checkpoints import tables
from models.training.checkpoints.found import (
    AUTO,
    META,
    SCHEMA,
    CheckpointError,
    Found,
    first_line,
    saved_steps,
    unfinished,
)
from models.training.checkpoints.manifest import write_manifest
from models.training.checkpoints.remote import StoreManager
from models.training.checkpoints.restoring import (
    agreed_steps,
    find,
    restored_state,
    set_aside_after,
)
from models.training.checkpoints.saving import Manager, Saving, open_manager
from models.training.checkpoints.shared import check_shared
from models.training.checkpoints.together import Together
from models.training.paths import AnyPath, StorePath, remove_tree
from models.training.run.loop import TrainState
from models.training.run.sinks import Record

MAX_FAILURES = 3
"""When so many saves in a row have failed, the run ends."""


class Checkpoints:
    """The checkpoints of one run; a context manager, which waits for the last save.

    Args:
        folder: where they are; made if it is not there. All processes have to see the same folder,
            which is checked.
        keep_last: how many of the latest are kept.
        keep_every: those of every n-th step are kept too; 0 keeps none of them.
        about: what else goes into each `meta.json`: `config` and `data`.
        pieces: whether `Pieces` are saved instead of arrays.

    Attributes:
        notes: a sentence for each interrupted or damaged save that was found in the folder.

    Raises:
        CheckpointError: the folder cannot be written, or processes do not share it.

    Example:
        >>> with Checkpoints(Path("run/checkpoints")) as checkpoints:
        ...     found = checkpoints.find()
        ...     state = fresh() if found is None else checkpoints.restore(found, targets)
        ...     checkpoints.save(train(state))
    """

    def __init__(
        self,
        folder: AnyPath,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        about: Mapping[str, Any] | None = None,
        pieces: bool = False,
    ) -> None:
        self.folder = folder.absolute()
        check_shared(self.folder)
        self.about = dict(about or {})
        self.notes = list(_interrupted(self.folder))
        self._keep, self._pieces = (keep_last, keep_every), pieces
        self._saving: Saving | None = None
        self._ended: list[Record] = []
        self._failures = 0
        self._failed_step: int | None = None
        self._together = Together()
        _remove_unfinished(self.folder)
        self._manager = self._open_manager()

    def _open_manager(self) -> Manager:
        keep, pieces = self._keep, self._pieces
        if not isinstance(self.folder, StorePath):
            return open_manager(self.folder, *keep, self._describe, self._together, pieces=pieces)
        if pieces:
            raise CheckpointError(f"{self.folder}: weights are turned into runs on a disk only")
        return StoreManager(self.folder, *keep, self._describe, self._together)

    # Saving

    def save(self, state: TrainState) -> None:
        """Begins to save a state.

        It returns when `state` may be donated, which is long before all of it is on the disk. It
        first waits for the save before this one. `Pieces` are written before it returns.

        Raises:
            CheckpointError: too many saves in a row have failed.
        """
        started = time.perf_counter()
        if self._saving is not None:
            self._end(self._saving)
        if self._failed_step is not None:
            self._reset(self._failed_step)
        self._together.begin()
        leaves = tables.by_path({"params": state.params, "opt_state": state.opt_state})
        saving = self._saving = Saving(
            state.step, self._meta(state.step, leaves), started, self._together
        )
        try:
            self._manager.save_state(state.step, tables.without_keys(leaves))
        except Exception as error:
            saving.error = error
        saving.stall = time.perf_counter() - started
        saving.watch(self._manager)

    def poll(self) -> list[Record]:
        """Returns a record for each save that has ended since the last call.

        Returns:
            Records with `save_seconds` and `save_stall_seconds`, or with `error`.

        Raises:
            CheckpointError: too many saves in a row have failed.
        """
        if self._saving is not None and not self._saving.is_running():
            self._end(self._saving)
        records, self._ended = self._ended, []
        return records

    def finish(self) -> None:
        """Waits for the last save.

        Raises:
            CheckpointError: it failed.
        """
        if self._saving is None:
            return
        saving = self._saving
        self._end(saving)
        if saving.error is not None:
            raise CheckpointError(str(self._ended.pop()["error"]))

    def _end(self, saving: Saving) -> None:
        """Waits for a save, and records what became of it."""
        saving.join()
        self._saving = None
        if saving.error is None:
            self._failures = 0
            # A save that failed before may have left a folder: tensorstore retries its writes in
            # the background, and so makes the folder again after `_reset` deleted it.
            _remove_unfinished(self.folder)
            self._ended.append(
                {
                    "step": saving.step,
                    "save_seconds": saving.ended - saving.started,
                    "save_stall_seconds": saving.stall,
                }
            )
            return
        self._failures += 1
        text = f"{_not_saved(saving)}; {self._latest_text()}"
        self._failed_step = saving.step
        if jax.process_count() == 1:  # several do it together, when they next save
            self._reset(saving.step)
        self._ended.append({"step": saving.step, "error": text})
        if self._failures >= MAX_FAILURES:
            raise CheckpointError(f"{text}; {self._failures} saves in a row have failed")

    def _reset(self, step: int) -> None:
        """After a failed save: deletes its files, and opens orbax's manager anew to forget it."""
        self._failed_step = None
        with contextlib.suppress(Exception):
            self._manager.close()
        _remove_unfinished(self.folder, step)
        self._manager = self._open_manager()

    def _latest_text(self) -> str:
        steps = saved_steps(self.folder)
        return f"the latest checkpoint is that of step {steps[0]}" if steps else "there is no other"

    def _meta(self, step: int, leaves: Mapping[str, Any]) -> dict[str, Any]:
        mesh = next(
            (dict(x.sharding.mesh.shape) for x in leaves.values() if hasattr(x.sharding, "mesh")),
            {},
        )
        about = {"schema": SCHEMA, "step": step, "mesh": mesh, "jax": jax.__version__}
        return {**about, **self.about, "arrays": tables.describe(leaves)}

    def _describe(self) -> None:
        """Adds `meta.json` and the manifest, just before the folder gets its final name."""
        saving = self._saving
        assert saving is not None
        (folder,) = (path for step, path in unfinished(self.folder) if step == saving.step)
        text = json.dumps(saving.meta, indent=1)
        (folder / META).write_text(text + "\n", encoding="utf-8")
        write_manifest(folder)

    def close(self) -> None:
        """Waits for the last save; a failure of it is ignored here."""
        with contextlib.suppress(CheckpointError):
            self.finish()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Restoring

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, the latest first; damaged ones are among them.

        All processes have to ask, and hear what process 0 sees.
        """
        return agreed_steps(self.folder)

    def find(self, wanted: int | str = AUTO) -> Found | None:
        """Finds a checkpoint to go on from.

        Args:
            wanted: a step, or `"auto"` for the latest checkpoint that is whole.

        Returns:
            The checkpoint; None if the folder has none at all.

        Raises:
            CheckpointError: the wanted step has no checkpoint or a damaged one, or all checkpoints
                are damaged.
        """
        return find(self.folder, wanted, self.notes)

    def restore(self, found: Found, targets: TrainState) -> TrainState:
        """Reads the state of a checkpoint in the shardings of `targets`, whatever mesh saved it.

        Layers that were saved stacked are unrolled if `targets` has them unrolled, and the other
        way round. Checkpoints of later steps, damaged or not, are renamed to `aside-STEP`: the
        run will take those steps again, and save them again.

        A checkpoint that was made from weights has no optimizer state. Its parameters are converted
        to the dtypes of `targets`, and `opt_state` of the result is None; the caller has to make
        it.

        Args:
            targets: `ShapeDtypeStruct`s with shardings.

        Raises:
            CheckpointError: it has other arrays than `targets`.
        """
        restored = restored_state(self._manager, found, targets)
        # Only now that reading succeeded: a restore that fails changes nothing.
        if set_aside_after(self.folder, found.step):
            self._manager.reload()
        return restored


def _remove_unfinished(folder: AnyPath, only: int | None = None) -> None:
    if jax.process_index() == 0:
        for step, path in unfinished(folder):
            if only in (None, step):
                with contextlib.suppress(OSError):
                    remove_tree(path)


def _interrupted(folder: AnyPath) -> list[str]:
    """A sentence for each save that was cut off, and whose files are about to be deleted."""
    return [
        f"the save of step {step} was interrupted; what it had written is removed"
        for step, _ in unfinished(folder)
    ]


def _not_saved(saving: Saving) -> str:
    assert saving.error is not None
    return f"the checkpoint of step {saving.step} could not be saved: {first_line(saving.error)}"
