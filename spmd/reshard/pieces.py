"""Pieces: which device holds which part of a value, which needs which, and who sends it to whom.

Collectives move values among the devices of one program. To those of another program pieces are
copied one by one, and only those that a device does not hold itself.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

Box = tuple[tuple[int, int], ...]
"""A part of a value: of each dim its first index, and the one behind its last."""


class Copy(NamedTuple):
    """A part of a value that the device `target` gets from `source`, which may be itself."""

    box: Box
    cut: Box | None  # where it lies in the part that `source` holds; None: it is all of that
    source: Any
    target: Any
    size: int  # elements


def boxes(sharding: Any, shape: Sequence[int]) -> dict[Any, Box]:
    """Returns device -> the part that it holds of a value with a sharding of jax."""
    held = sharding.devices_indices_map(tuple(shape)).items()
    return {d: tuple(i.indices(n)[:2] for i, n in zip(at, shape, strict=True)) for d, at in held}


def copies(have: dict[Any, Box], need: dict[Any, Box], sent: Counter[Any]) -> list[list[Copy]]:
    """Returns for each device of `need` the copies that make up its part, in row-major order.

    Of several holders the nearest sends, first those of the same process; of equally near ones that
    which has `sent` the fewest elements so far, which this counts on.
    """
    # The parts of a sharding are the cells of a grid, and so are their cuts with another part:
    # of (4, 4) in rows over 2 devices, columns 0 and 1 are 2 x 2 of each, one above the other.
    holders: dict[Box, list[Any]] = {}
    for device, box in have.items():
        holders.setdefault(box, []).append(device)
    found = []
    for target, wanted in need.items():
        found.append(pieces := list[Copy]())
        for held in sorted(holders):
            box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, wanted, strict=True))
            size = math.prod(max(0, stop - start) for start, stop in box)
            if size:
                source = target
                if have.get(target) != held:
                    near = [(_distance(d, target), sent[d], d.id, d) for d in holders[held]]
                    source = min(near)[-1]
                    sent[source] += size
                cut = tuple((a - at, b - at) for (a, b), (at, _) in zip(box, held, strict=True))
                pieces.append(Copy(box, None if box == held else cut, source, target, size))
    return found


def _distance(one: Any, other: Any) -> tuple[bool, int]:
    ends = (getattr(device, "coords", ()) for device in (one, other))  # of a TPU, in its torus
    hops = sum(abs(a - b) for a, b in zip(*ends, strict=True))
    return one.process_index != other.process_index, hops
