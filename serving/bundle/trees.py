"""How outputs are put together, as data: JSON in which numbers stand for leaves.

Dicts are objects, tuples and lists are lists, and whatever has named fields (named tuples,
dataclasses) is an object whose names begin with a dot. So
`{"made": Tokens(ids=.., scores=(.., ..))}` is `{"made": {".ids": 0, ".scores": [1, 2]}}`.
"""

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax

from spmd.serving.bundle.function import BundleError

DEEPEST = 100

Template = Any
"""A leaf's number, None, a list of templates, or names -> templates."""


def template_of(tree: Any) -> Template:
    """The template of a pytree.

    Raises:
      BundleError: a node whose children have neither names nor places.
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return _group([(path, number) for number, path in enumerate(paths)])


def _group(leaves: Sequence[tuple[Any, int]]) -> Template:
    if not leaves:
        return None
    if not leaves[0][0]:
        return leaves[0][1]
    children: dict[Any, list[tuple[Any, int]]] = {}
    for path, number in leaves:
        children.setdefault(_key(path[0]), []).append((path[1:], number))
    if all(isinstance(key, int) for key in children):
        return [_group(children.get(i, [])) for i in range(max(children) + 1)]
    return {str(key): _group(below) for key, below in children.items()}


def _key(entry: Any) -> int | str:
    match entry:
        case jax.tree_util.SequenceKey(idx=index):
            return int(index)
        case jax.tree_util.DictKey(key=key):
            return str(key)
        case jax.tree_util.GetAttrKey(name=name):
            return f".{name}"
    raise BundleError(f"an output lies in a container whose parts have no names: {entry}")


@functools.cache
def _named(names: tuple[str, ...]) -> Any:
    """The named tuples with such fields; those that cannot be names have their place instead."""
    return collections.namedtuple("Fields", names, rename=True)  # type: ignore[misc]


def fill(template: Template, leaves: Sequence[Any]) -> Any:
    """The leaves, put together: dicts, tuples and named tuples."""
    if template is None:
        return None
    if isinstance(template, list):
        return tuple(fill(part, leaves) for part in template)
    if isinstance(template, dict) and template and all(name[:1] == "." for name in template):
        values = (fill(part, leaves) for part in template.values())
        return _named(tuple(name[1:] for name in template))(*values)
    if isinstance(template, dict):
        return {name: fill(part, leaves) for name, part in template.items()}
    return leaves[template]


def check_template(template: Template, count: int, where: str) -> None:
    """Raise a `BundleError` unless each of so many leaves is in a template once."""
    numbers: list[int] = []
    waiting = [(template, 0)]
    while waiting:
        part, depth = waiting.pop()
        if depth > DEEPEST:
            raise BundleError(f"{where}: tree nests more than {DEEPEST} containers")
        if isinstance(part, list | dict):
            inner = part.values() if isinstance(part, dict) else part
            waiting += [(one, depth + 1) for one in inner]
        elif type(part) is int:
            numbers.append(part)
        elif part is not None:
            raise BundleError(f"{where}: tree has {part!r:.40} where a leaf's number should be")
    if sorted(numbers) != list(range(count)):
        raise BundleError(f"{where}: tree does not hold each of {count} outputs once")
