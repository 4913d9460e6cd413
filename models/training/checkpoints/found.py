"""Finds checkpoints in a folder and checks that they are whole; changes nothing there.

A run may be writing to the folder at the same time: a checkpoint that it is still writing has
another name until it is complete, and is not seen.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd.models.training.checkpoints.manifest import MANIFEST, find_damage
from spmd.models.training.paths import AnyPath, StorePath

SCHEMA = 1
META = "meta.json"
AUTO = "auto"

TEMPORARY = re.compile(r"(\d+)\.orbax-checkpoint-tmp")
"""How orbax calls what it has not finished."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; the message says which, and what to do."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint whose files are all there and undamaged."""

    step: int  # the step after which it was saved
    meta: Mapping[str, Any]  # what `meta.json` holds

    @property
    def has_optimizer(self) -> bool:
        """Whether it has optimizer state; a checkpoint made from weights alone has none."""
        return any(path.startswith("opt_state/") for path in self.meta["arrays"])


def find_saved(folder: AnyPath, wanted: int | str = AUTO) -> Found:
    """Finds a checkpoint to read from.

    Args:
        wanted: a step, or `"auto"` for the latest checkpoint that is whole.

    Raises:
        CheckpointError: there is none, or the wanted one is damaged.
    """
    notes: list[str] = []
    found = first_whole(folder, saved_steps(folder), wanted, find_damage, notes)
    if found is None:
        raise CheckpointError("; ".join(notes) or f"{folder} has no checkpoint yet")
    return found


def saved_steps(folder: AnyPath) -> list[int]:
    """Steps that have a checkpoint, the latest first; damaged ones are among them."""
    if not folder.is_dir():
        return []
    if isinstance(folder, StorePath):  # the manifest, written last, stands for the rename
        names = [path.parent.name for path in folder.glob(f"*/{MANIFEST}")]
    else:
        names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def unfinished(folder: AnyPath) -> list[tuple[int, AnyPath]]:
    """The steps whose saves are under way or were cut off, each with what it is written to."""
    if not folder.is_dir():
        return []
    if isinstance(folder, StorePath):
        whole = set(saved_steps(folder))
        begun = {int(p.name): p for p in folder.iterdir() if p.name.isdecimal()}
        return [(step, path) for step, path in sorted(begun.items()) if step not in whole]
    named = ((TEMPORARY.match(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match)


def first_whole(
    folder: AnyPath,
    steps: Sequence[int],
    wanted: int | str,
    damage_of: Callable[[AnyPath], str | None],
    notes: list[str],
) -> Found | None:
    """The wanted checkpoint, or for `"auto"` the latest one, that is whole; None if there is none.

    Args:
        steps: those that have a checkpoint, the latest first.
        wanted: a step, or `"auto"`.
        damage_of: says what is wrong with a checkpoint's folder, or None.
        notes: gets a sentence for each damaged checkpoint.

    Raises:
        CheckpointError: the wanted step has no checkpoint, or one of another schema.
    """
    if wanted != AUTO and int(wanted) not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{folder} has no checkpoint of step {wanted}; there are: {there}")
    for step in steps if wanted == AUTO else [int(wanted)]:
        damage = damage_of(folder / str(step))
        if damage is not None:
            notes.append(f"the checkpoint of step {step} is damaged: {damage}")
            continue
        file = folder / str(step) / META
        meta = json.loads(file.read_text(encoding="utf-8"))
        if meta.get("schema") != SCHEMA:
            raise CheckpointError(
                f"{file} has schema {meta.get('schema')!r} and this program knows {SCHEMA}; use "
                "the version of the program that wrote it"
            )
        return Found(step, meta)
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error's message; a full disk is named in plain words."""
    text = str(error)
    if "No space left" in text or "ENOSPC" in text or "RESOURCE_EXHAUSTED" in text:
        return "no space is left on the disk"
    text = text.split(" [tensorstore_spec=")[0]  # thousands of characters
    return (text.strip().splitlines() or [type(error).__name__])[0]
