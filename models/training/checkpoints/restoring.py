"""Restores a run from a checkpoint: which one, its arrays on this mesh, and what follows it.

All processes of a run do this together, and agree on each step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax

from models.training.checkpoints import tables
from models.training.checkpoints.found import (
    AUTO,
    CheckpointError,
    Found,
    first_line,
    first_whole,
    saved_steps,
    wanted_steps,
)
from models.training.checkpoints.manifest import MANIFEST, find_damage
from models.training.checkpoints.saving import Manager
from models.training.paths import AnyPath, move_tree
from models.training.run.loop import TrainState
from spmd import launch

HASHING_S = 4 * 3600.0
"""So many seconds later than the fastest process the slowest may have hashed its share."""


def agreed_steps(folder: AnyPath) -> list[int]:
    """`saved_steps`, as process 0 sees them: a disk may show others something else for a while."""
    steps = json.dumps(saved_steps(folder))
    return list(json.loads(launch.from_first(steps, label="steps of checkpoints")))


def find(folder: AnyPath, wanted: int | str, notes: list[str]) -> Found | None:
    """Finds a checkpoint to go on from; see `Checkpoints.find`.

    Args:
        wanted: a step, or `"auto"`.
        notes: gets a sentence for each damaged checkpoint.
    """
    steps = wanted_steps(folder, agreed_steps(folder), wanted)
    found = first_whole(folder, steps, _damage, notes)
    if found is None and wanted != AUTO:
        raise CheckpointError(
            f"{notes[-1]}; resume from another step or the latest whole one (auto)"
        )
    if found is None and steps:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole: {'; '.join(notes)}; choose another folder to "
            "start anew"
        )
    return found


def _damage(folder: AnyPath) -> str | None:
    """What is wrong with a checkpoint, the same on all processes; each reads some files."""
    damage = find_damage(folder, jax.process_index(), jax.process_count())
    # All processes have to agree, or some would restore one step and some another.
    label = f"the checkpoint of step {folder.name}"
    said = launch.exchange(damage or "", label=label, timeout_s=HASHING_S)
    return next((text for text in said if text), None)


def restored_state(manager: Manager, found: Found, targets: TrainState) -> TrainState:
    """Reads a checkpoint's arrays as `targets` has them; see `Checkpoints.restore`."""
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
    leaves = _read(manager, found.step, structs)
    if not is_same:
        leaves = tables.convert(leaves, wanted)
    restored = tables.like(tree, leaves)
    return TrainState(restored["params"], restored.get("opt_state"), found.step)


def _read(manager: Manager, step: int, structs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        leaves = manager.restore_state(step, tables.without_keys(structs))
        return tables.with_keys(leaves, structs)
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be read: {first_line(error)}"
        ) from error


def set_aside_after(folder: AnyPath, step: int) -> bool:
    """Renames the checkpoints of later steps to `aside-STEP`; returns whether there were any.

    Raises:
        CheckpointError: process 0 cannot rename them.
    """
    later = [other for other in agreed_steps(folder) if other > step]
    failure = ""
    if jax.process_index() == 0:
        try:
            for other in later:
                _set_aside(folder / str(other))
        except (OSError, CheckpointError) as error:
            failure = str(error)
    # Nobody may save a step that process 0 still moves.
    failure = launch.from_first(failure, label="checkpoints set aside")
    if failure:
        raise CheckpointError(failure)
    return bool(later)


def _set_aside(folder: AnyPath) -> None:
    for number in range(1000):
        name = f"aside-{folder.name}" + (f"-{number}" if number else "")
        if not folder.with_name(name).exists():
            move_tree(folder, folder.with_name(name), MANIFEST)
            return
    raise CheckpointError(f"{folder} cannot be moved: remove what is called aside-{folder.name}")
