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

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

import jax

from spmd import launch
from spmd.models.training.checkpoints import tables
from spmd.models.training.checkpoints.found import (
    AUTO,
    META,
    SCHEMA,
    CheckpointError,
    Found,
    first_line,
    first_whole,
    saved_steps,
    unfinished,
)
from spmd.models.training.checkpoints.manifest import MANIFEST, find_damage, write_manifest
from spmd.models.training.checkpoints.remote import StoreManager
from spmd.models.training.checkpoints.saving import DiskManager, Kept, Saving, open_manager
from spmd.models.training.checkpoints.together import Together, check_shared
from spmd.models.training.paths import AnyPath, StorePath, move_tree, remove_tree
from spmd.models.training.run.loop import TrainState
from spmd.models.training.run.sinks import Record

HASHING_S = 4 * 3600.0
"""So many seconds later than the fastest process the slowest may have hashed its share."""

MAX_FAILURES = 3
"""When so many saves in a row have failed, the run ends."""


class Checkpoints:
    """The checkpoints of one run; a context manager, which waits for the last save.

    Args:
        folder: where they are; made if it is not there. All processes have to see the same folder,
            which is checked.
        keep_last: how many of the latest are kept.
        keep_every: those of every n-th step are kept too; 0 keeps none of them.
        keep_best: whether that of the best evaluation is kept too.
        about: what else goes into each `meta.json`: `config` and `data`; it goes before what is
            known here.
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
        keep_best: bool = False,
        about: Mapping[str, Any] | None = None,
        pieces: bool = False,
    ) -> None:
        self.folder = folder.absolute()
        check_shared(self.folder)
        self.about = dict(about or {})
        self.notes = [
            f"the save of step {step} was interrupted; what it had written is removed"
            for step, _ in unfinished(self.folder)
        ]
        self._keep, self._pieces = Kept(keep_last, keep_every), pieces
        self._keep_best = keep_best
        self._saving: Saving | None = None
        self._ended: list[Record] = []
        self._failures = 0
        self._failed_step: int | None = None
        self._together = Together()
        _remove_unfinished(self.folder)
        self._manager = self._open_manager()

    def _open_manager(self) -> DiskManager | StoreManager:
        keep, pieces = self._keep, self._pieces
        if not isinstance(self.folder, StorePath):
            return open_manager(self.folder, keep, self._describe, self._together, pieces=pieces)
        if pieces:
            raise CheckpointError(f"{self.folder}: weights are turned into runs on a disk only")
        return StoreManager(self.folder, keep, self._describe, self._together)

    # Saving

    def save(self, state: TrainState, notes: Mapping[str, Any] | None = None) -> None:
        """Begins to save a state.

        It returns when `state` may be donated, which is long before all of it is on the disk. It
        first waits for the save before this one. `Pieces` are written before it returns.

        Args:
            notes: more for `meta.json`: `samples` that were seen, and the `best` evaluation.

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
        shardings = [leaf.sharding for leaf in leaves.values()]
        mesh = next((dict(s.mesh.shape) for s in shardings if hasattr(s, "mesh")), {})
        meta = {"schema": SCHEMA, "step": state.step, "mesh": mesh, "jax": jax.__version__}
        notes = {name: note for name, note in (notes or {}).items() if note}
        if self._keep_best and "best" in notes:
            self._keep.best = notes["best"]["step"]
        meta |= {**notes, **self.about}
        meta.setdefault("arrays", tables.describe(leaves))
        finish = self._manager.finish
        saving = self._saving = Saving(state.step, meta, started, finish, self._together)
        try:
            self._manager.save_state(state.step, tables.without_keys(leaves))
        except Exception as error:
            saving.error = error
        saving.stall = time.perf_counter() - started
        saving.start()

    def poll(self) -> list[Record]:
        """Returns a record for each save that has ended since the last call.

        Returns:
            Records with `save_seconds` and `save_stall_seconds`, or with `error`.

        Raises:
            CheckpointError: too many saves in a row have failed.
        """
        if self._saving is not None and not self._saving.is_alive():
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
        if saving.is_alive():
            saving.join()
        self._saving = None
        if saving.error is None:
            self._failures = 0
            # A save that failed before may have left a folder: tensorstore retries its writes in
            # the background, and so makes the folder again after `_reset` deleted it.
            _remove_unfinished(self.folder)
            seconds = saving.ended - saving.started
            times = {"save_seconds": seconds, "save_stall_seconds": saving.stall}
            self._ended.append({"step": saving.step, **times})
            return
        self._failures += 1
        steps = saved_steps(self.folder)
        latest = (
            f"the latest checkpoint is that of step {steps[0]}" if steps else "there is no other"
        )
        why = first_line(saving.error)
        text = f"the checkpoint of step {saving.step} could not be saved: {why}; {latest}"
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

    def _describe(self) -> None:
        """Adds `meta.json` and the manifest, just before the folder gets its final name."""
        saving = self._saving
        assert saving is not None
        (folder,) = (path for step, path in unfinished(self.folder) if step == saving.step)
        (folder / META).write_text(json.dumps(saving.meta, indent=1) + "\n", encoding="utf-8")
        write_manifest(folder)

    def close(self) -> None:
        """Waits for the last save; a failure of it is ignored here."""
        with contextlib.suppress(CheckpointError):
            self.finish()
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Restoring

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, the latest first; damaged ones are among them.

        All processes have to ask, and hear what process 0 sees.
        """
        # What process 0 sees: a disk may show others something else for a while.
        steps = json.dumps(saved_steps(self.folder))
        return list(json.loads(launch.from_first(steps, label="steps of checkpoints")))

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
        steps = self.steps()
        found = first_whole(self.folder, steps, wanted, _damage, self.notes)
        if found is None and wanted != AUTO:
            raise CheckpointError(
                f"{self.notes[-1]}; resume from another step or the latest whole one (auto)"
            )
        if found is None and steps:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole: {'; '.join(self.notes)}; choose another "
                "folder to start anew"
            )
        return found

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
        tree = {"params": targets.params}
        if found.has_optimizer:
            tree["opt_state"] = targets.opt_state
        wanted = tables.by_path(tree)
        saved = found.meta["arrays"]
        layouts = (tables.is_stacked(saved), tables.is_stacked(wanted))
        is_same = None in layouts or layouts[0] == layouts[1]
        structs = wanted if is_same else tables.other_layout(wanted)
        problem = tables.mismatch(saved, structs, any_dtype=not found.has_optimizer)
        if problem is not None:
            raise CheckpointError(
                f"the checkpoint of step {found.step} does not fit this run: {problem}"
                + ("" if is_same else " (layers stacked in one and unrolled in the other)")
            )
        try:
            leaves = self._manager.restore_state(found.step, tables.without_keys(structs))
            leaves = tables.with_keys(leaves, structs)
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint of step {found.step} cannot be read: {first_line(error)}"
            ) from error
        restored = tables.like(tree, leaves if is_same else tables.convert(leaves, wanted))
        # Only now that reading succeeded: a restore that fails changes nothing.
        self._set_aside_after(found.step)
        return TrainState(restored["params"], restored.get("opt_state"), found.step)

    def _set_aside_after(self, step: int) -> None:
        """Renames the checkpoints of later steps to `aside-STEP`."""
        later = [other for other in self.steps() if other > step]
        failure = ""
        if jax.process_index() == 0:
            try:
                for other in later:
                    _set_aside(self.folder / str(other))
            except (OSError, CheckpointError) as error:
                failure = str(error)
        # Nobody may save a step that process 0 still moves.
        failure = launch.from_first(failure, label="checkpoints set aside")
        if failure:
            raise CheckpointError(failure)
        if later:
            self._manager.reload()


def _damage(folder: AnyPath) -> str | None:
    """What is wrong with a checkpoint, the same on all processes; each reads some files."""
    damage = find_damage(folder, jax.process_index(), jax.process_count())
    # All processes have to agree, or some would restore one step and some another.
    label = f"the checkpoint of step {folder.name}"
    said = launch.exchange(damage or "", label=label, timeout_s=HASHING_S)
    return next((text for text in said if text), None)


def _set_aside(folder: AnyPath) -> None:
    for number in range(1000):
        name = f"aside-{folder.name}" + (f"-{number}" if number else "")
        if not folder.with_name(name).exists():
            move_tree(folder, folder.with_name(name), MANIFEST)
            return
    raise CheckpointError(f"{folder} cannot be moved: remove what is called aside-{folder.name}")


def _remove_unfinished(folder: AnyPath, only: int | None = None) -> None:
    if jax.process_index() == 0:
        for step, path in unfinished(folder):
            if only in (None, step):
                with contextlib.suppress(OSError):
                    remove_tree(path)
