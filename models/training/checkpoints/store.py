"""Checkpoints: saved in the background, whole or not at all, restored onto any mesh.

    checkpoints/
        200/
            meta.json        step, config, data, mesh; shape, dtype and spec of every array
            manifest.json    size and hash of every file
            state/           parameters and optimizer state, written by orbax

A checkpoint gets its name when all of it has been written; `manifest.json` is how a later run
notices that one was damaged since. Restoring reads each device's part of each array only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from models.training.checkpoints import tables
from models.training.checkpoints.manifest import find_damage, write_manifest
from models.training.checkpoints.pieces import Pieces, PiecesHandler
from models.training.run.loop import TrainState
from models.training.run.sinks import Record

SCHEMA = 1
META = "meta.json"
AUTO = "auto"
SHARED_BYTES = 2**20
"""Replicas share the writing of pieces of at least this size; slicing takes a compiled program."""

MAX_FAILURES = 3
"""So many saves in a row may fail before the run ends."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; says which one, and what to do."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint that is whole.

    Args:
        step: after which it was saved.
        meta: what `meta.json` holds.
        notes: a sentence on each later one that is not whole.
    """

    step: int
    meta: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def has_optimizer(self) -> bool:
        """Whether there is optimizer state; one made of weights alone has parameters only."""
        return any(path.startswith("opt_state/") for path in self.meta["arrays"])


class _Manager(ocp.CheckpointManager):  # type: ignore[misc]
    """Orbax's, without its question whether there was a SIGTERM.

    It asks on process 0 alone, and jax counts the questions of all processes to agree on a step.
    """

    def reached_preemption(self, step: int) -> bool:
        del step
        return False


class Checkpoints:
    """The checkpoints of one run; a context manager, which waits for the last save.

    Args:
        folder: where they are; made if it is not there. All processes have to see it.
        keep_last: so many of the latest are kept.
        keep_every: those of every n-th step are kept too; 0 keeps none of them.
        about: what else `meta.json` says of each: `config` and `data`.
        pieces: whether leaves to be saved are `Pieces`: folders are made before these are read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        about: Mapping[str, Any] | None = None,
        pieces: bool = False,
    ) -> None:
        self.folder = folder.absolute()
        self.about = dict(about or {})
        self.notes = list(_interrupted(self.folder))
        self._keep, self._pieces = (keep_last, keep_every), pieces
        self._saving: _Saving | None = None
        self._ended: list[Record] = []
        self._failures = 0
        _remove_unfinished(self.folder)
        self._manager = self._open_manager()

    def _open_manager(self) -> ocp.CheckpointManager:
        last, every = self._keep
        kept: list[policies.PreservationPolicy] = [policies.LatestN(last)]
        kept += [policies.EveryNSteps(every)] if every else []
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(kept),
            save_root_metadata=False,
            lightweight_initialize=True,
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._describe,
                create_directories_asynchronously=not self._pieces,
            ),
        )
        return _Manager(self.folder, options=options, item_handlers={"state": _state_handler()})

    # Saving

    def save(self, state: TrainState) -> None:
        """Starts saving; returns when `state` may be donated, long before all is written.

        Waits for the save before this one, if that is not finished. `Pieces` are written before it
        returns.

        Raises:
            CheckpointError: too many saves in a row have failed.
        """
        started = time.perf_counter()
        if self._saving is not None:
            self._end(self._saving)
        leaves = tables.by_path({"params": state.params, "opt_state": state.opt_state})
        saving = self._saving = _Saving(state.step, self._meta(state.step, leaves), started)
        try:
            self._manager.save(
                state.step,
                args=ocp.args.Composite(state=ocp.args.PyTreeSave(tables.nested(leaves))),
                force=True,
            )
        except Exception as error:
            saving.error = error
        saving.stall = time.perf_counter() - started
        saving.watch(self._manager)

    def poll(self) -> list[Record]:
        """Records of saves that have ended since it was asked last: seconds and stall, or an error.

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

    def _end(self, saving: _Saving) -> None:
        """Waits for a save, and takes down what became of it."""
        saving.join()
        self._saving = None
        if saving.error is None:
            self._failures = 0
            # Of a save that failed: tensorstore tries again, and makes its folder once more.
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
        self._reset(saving.step)
        self._ended.append({"step": saving.step, "error": text})
        if self._failures >= MAX_FAILURES:
            raise CheckpointError(f"{text}; {self._failures} saves in a row have failed")

    def _reset(self, step: int) -> None:
        """After a failed save: its files make room, and orbax forgets it."""
        with contextlib.suppress(Exception):
            self._manager.close()
        _remove_unfinished(self.folder, str(step))
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
        """Called by orbax, on process 0, before a checkpoint that has been written is named."""
        saving = self._saving
        assert saving is not None
        (folder,) = self.folder.glob(f"{saving.step}.orbax-checkpoint-tmp*")
        text = json.dumps(saving.meta, indent=1)
        (folder / META).write_text(text + "\n", encoding="utf-8")
        write_manifest(folder)

    def close(self) -> None:
        """Waits for the last save, whatever becomes of it."""
        with contextlib.suppress(CheckpointError):
            self.finish()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Restoring

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, the latest first; they may be damaged."""
        return saved_steps(self.folder)

    def find(self, wanted: int | str = AUTO) -> Found | None:
        """The checkpoint of a step, or (`"auto"`) the latest that is whole; None if there is none.

        Raises:
            CheckpointError: the step that was asked for has no checkpoint or a damaged one, or all
                there are are damaged.
        """
        steps = self.steps()
        if wanted != AUTO:
            return self._find_step(int(wanted), steps)
        notes = self.notes
        for step in steps:
            damage = self._damage(step)
            if damage is None:
                return Found(step, _read_meta(self.folder / str(step)), tuple(notes))
            notes.append(f"the checkpoint of step {step} is damaged: {damage}")
        if steps:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole: {'; '.join(notes)}; choose another "
                "folder to start anew"
            )
        return None

    def _find_step(self, step: int, steps: list[int]) -> Found:
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(
                f"{self.folder} has no checkpoint of step {step}; there are: {there}"
            )
        damage = self._damage(step)
        if damage is not None:
            raise CheckpointError(
                f"the checkpoint of step {step} is damaged: {damage}; resume from another step or "
                "the latest whole one (auto)"
            )
        return Found(step, _read_meta(self.folder / str(step)), tuple(self.notes))

    def _damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint; each process reads its share of the files."""
        folder = self.folder / str(step)
        count = jax.process_count()
        damage = find_damage(folder, jax.process_index(), count)
        if count == 1:
            return damage
        flags = multihost_utils.process_allgather(damage is not None)
        others = [i for i, bad in enumerate(flags) if bad]
        return damage or (f"process {others[0]} cannot read it" if others else None)

    def restore(self, found: Found, targets: TrainState) -> TrainState:
        """The state of a checkpoint, in the shardings of `targets`, which may be of another mesh.

        Layers that were saved stacked come back unrolled where `targets` has them so, and the
        other way round. Checkpoints of later steps, damaged or not, are moved to `aside-<step>`:
        those steps will be taken and saved again.

        Of parameters that were saved without an optimizer's state, any dtype becomes that of
        `targets`; the state's `opt_state` is None then, and for the caller to make.

        Args:
            found: which one.
            targets: `ShapeDtypeStruct`s with shardings.

        Raises:
            CheckpointError: its arrays are not those of `targets`.
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
        leaves = self._read(found.step, structs)
        if not is_same:
            leaves = tables.convert(leaves, wanted)
        self._set_aside_after(found.step)
        restored = tables.like(tree, leaves)
        return TrainState(restored["params"], restored.get("opt_state"), found.step)

    def _read(self, step: int, structs: Mapping[str, Any]) -> dict[str, Any]:
        tree = tables.nested(structs)
        how = ocp.checkpoint_utils.construct_restore_args(tree)
        args = ocp.args.PyTreeRestore(tree, restore_args=how)
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(state=args))
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be read: {first_line(error)}"
            ) from error
        return tables.by_path(restored["state"])

    def _set_aside_after(self, step: int) -> None:
        later = [other for other in self.steps() if other > step]
        if jax.process_index() == 0:
            for other in later:
                _set_aside(self.folder / str(other))
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoints set aside")
        if later:
            self._manager.reload()


def _state_handler() -> ocp.PyTreeCheckpointHandler:
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=SHARED_BYTES)
    handlers = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (Pieces, PiecesHandler())
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=handlers)


class _Saving:
    """A save in progress."""

    def __init__(self, step: int, meta: Mapping[str, Any], started: float) -> None:
        self.step, self.meta, self.started = step, meta, started
        self.stall = self.ended = 0.0
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None

    def watch(self, manager: ocp.CheckpointManager) -> None:
        """Waits for the save on a thread, to know when it ended and how."""
        self._thread = threading.Thread(target=self._wait, args=(manager,), daemon=True)
        self._thread.start()

    def _wait(self, manager: ocp.CheckpointManager) -> None:
        try:
            if self.error is None:
                manager.wait_until_finished()
                manager.check_for_errors()
        except Exception as error:
            self.error = error
        self.ended = time.perf_counter()

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()


def saved_steps(folder: Path) -> list[int]:
    """Steps of which a folder has a checkpoint, whole or not, the latest first."""
    if not folder.is_dir():
        return []
    names = (path.name for path in folder.iterdir() if path.is_dir())
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def _remove_unfinished(folder: Path, step: str = "*") -> None:
    if jax.process_index() == 0:
        for path in folder.glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(path, ignore_errors=True)


def _interrupted(folder: Path) -> list[str]:
    """A sentence on each save that was cut off, and whose files are removed."""
    if not folder.is_dir():
        return []
    steps = {re.match(r"(\d+)\.orbax-checkpoint-tmp", path.name) for path in folder.iterdir()}
    return [
        f"the save of step {step} was interrupted; what it had written is removed"
        for step in sorted(int(match[1]) for match in steps if match)
    ]


def _set_aside(folder: Path) -> None:
    for number in range(1000):
        name = f"aside-{folder.name}" + (f"-{number}" if number else "")
        if not folder.with_name(name).exists():
            folder.rename(folder.with_name(name))
            return
    raise CheckpointError(f"{folder} cannot be moved: remove what is called aside-{folder.name}")


def _read_meta(folder: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
    if meta.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{folder / META} has schema {meta.get('schema')!r} and this program knows {SCHEMA}; "
            "use the version of the program that wrote it"
        )
    return meta


def _not_saved(saving: _Saving) -> str:
    assert saving.error is not None
    return f"the checkpoint of step {saving.step} could not be saved: {first_line(saving.error)}"


def first_line(error: BaseException) -> str:
    """What an error comes down to, in one line."""
    text = str(error)
    if "No space left" in text or "ENOSPC" in text or "RESOURCE_EXHAUSTED" in text:
        return "no space is left on the disk"
    text = text.split(" [tensorstore_spec=")[0]  # thousands of characters
    return (text.strip().splitlines() or [type(error).__name__])[0]


def find_saved(folder: Path, wanted: int | str = AUTO) -> Found:
    """A checkpoint to read from, in a folder that a run may be writing to: nothing is changed.

    Args:
        folder: holds checkpoints.
        wanted: a step, or `"auto"`, the latest that is whole.

    Raises:
        CheckpointError: there is none, or what was asked for is damaged.
    """
    steps = saved_steps(folder) if wanted == AUTO else [int(wanted)]
    notes: list[str] = []
    for step in steps:
        if not (folder / str(step)).is_dir():
            there = ", ".join(map(str, saved_steps(folder))) or "none"
            raise CheckpointError(f"{folder} has no checkpoint of step {step}; there are: {there}")
        damage = find_damage(folder / str(step))
        if damage is None:
            return Found(step, _read_meta(folder / str(step)), tuple(notes))
        notes.append(f"the checkpoint of step {step} is damaged: {damage}")
    raise CheckpointError("; ".join(notes) or f"{folder} has no checkpoint yet")
