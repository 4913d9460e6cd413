"""Names that a model's weights have in its file and in its module, which may differ in front.

model.layers.0.w        a tensor of the file
params/layers/0/w       the argument of the module: `params['layers'][0]['w']`
layers/0/w       what they share
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from serving.bundle.function import BundleError
from serving.bundle.manifest import WEIGHTS

Parts = tuple[str, ...]


def parts_of(name: str) -> Parts:
    """`model.layers.0/w` -> `("model", "layers", "0", "w")`."""
    return tuple(part for part in name.replace(".", "/").split("/") if part)


def matched(tensors: Sequence[str], arguments: Sequence[str]) -> dict[str, str]:
    """The argument that each tensor is for: of its name, but for a prefix that all of them have.

    Args:
      tensors: names in the file.
      arguments: of the module.

    Returns:
      Tensor -> argument; empty if no prefixes make all tensors arguments.

    Raises:
      BundleError: several prefixes do.

    Example:
      >>> matched(["model.w", "model.b"], ["params/w", "params/b", "x"])
      {'model.w': 'params/w', 'model.b': 'params/b'}
    """
    if set(tensors) <= set(arguments):
        return {name: name for name in tensors}
    known = {parts_of(name): name for name in arguments}
    wanted = {name: parts_of(name) for name in tensors}
    for cut in range(len(_common(list(wanted.values()))) + 1):
        tails = {name: parts[cut:] for name, parts in wanted.items()}
        first = next(iter(tails.values()))
        fronts = [a[: len(a) - len(first)] for a in known if first and a[-len(first) :] == first]
        fitting = [q for q in fronts if all(q + tail in known for tail in tails.values())]
        if len(fitting) > 1:
            names = " and ".join("/".join(front) or "none" for front in fitting[:3])
            raise BundleError(
                f"arguments of several prefixes are called like the weights ({names}): give the "
                "weights the names of the arguments"
            )
        if fitting:
            return {name: known[fitting[0] + tail] for name, tail in tails.items()}
    return {}


def _common(names: Sequence[Parts]) -> Parts:
    """The front that all names have, less than a whole name."""
    front: list[str] = []
    for parts in zip(*(name[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        front.append(parts[0])
    return tuple(front)


def own_specs(
    specs: Mapping[str, Any], tensors: Mapping[str, str], paths: Iterable[str]
) -> dict[str, Any]:
    """Specs by the model's own names, as specs by paths of the bundle.

    Args:
      specs: pattern -> spec. A pattern may be of paths (`weights/params/w`), of the file's names
        (`model.layers.*.w`), of the arguments' (`params/layers/*/w`), or of what these share
        (`layers.*.w`); `.` and `/` are alike in it.
      tensors: tensor -> argument.
      paths: of all leaves.

    Returns:
      Path or pattern of paths -> spec. Patterns that match nothing stay as they are.
    """
    known = list(paths)
    found: dict[str, Any] = {}
    for pattern, spec in specs.items():
        if any(path == pattern or fnmatch.fnmatchcase(path, pattern) for path in known):
            found.setdefault(pattern, spec)
            continue
        glob = "/".join(parts_of(pattern))
        fitting = [
            f"{WEIGHTS}/{argument}"
            for tensor, argument in tensors.items()
            if any(fnmatch.fnmatchcase(name, glob) for name in _spellings(tensor, argument))
        ]
        for path in fitting or [pattern]:
            found.setdefault(path, spec)
    return found


def _spellings(tensor: str, argument: str) -> list[str]:
    one, other = parts_of(tensor), parts_of(argument)
    shared = 0
    while shared < min(len(one), len(other)) and one[-1 - shared] == other[-1 - shared]:
        shared += 1
    return ["/".join(parts) for parts in (one, other, one[len(one) - shared :])]
