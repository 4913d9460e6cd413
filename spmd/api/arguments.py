"""Arguments of a call: the names and donation of their leaves, and their specs and the results'."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from spmd.api.marks import caller, path_name, some_of, spec_error
from spmd.errors import MeshError, described
from spmd.frontend.marks import Entries
from spmd.ir.dialect.host import HOST
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import axis_refs, part_atoms
from spmd.mesh.spec import OPEN, as_mesh, dims_of, match_patterns, numbered_as, spec_entries

Numbers = int | Sequence[int] | None
Names = str | Iterable[str] | None

E = TypeVar("E")

_BY_BOTH = inspect.Parameter.POSITIONAL_OR_KEYWORD


class Selected(NamedTuple):
    """Static or donated parameters, for `jax.jit`: (numbers, names), as ((1,), ("mode",))."""

    numbers: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, fn: Any, numbers: Numbers, names: Names) -> "Selected":
        """Returns the parameters that `..._argnums` and `..._argnames` select, as in `jax.jit`.

        If only one of `numbers` and `names` is given, the other is read off the signature of `fn`,
        so that it does not matter whether a call passes the argument by position or by name.
        """
        by_number = (numbers,) if isinstance(numbers, int) else tuple(numbers or ())
        by_name = (names,) if isinstance(names, str) else tuple(names or ())
        parameters = parameters_of(fn)
        named = {i: p.name for i, p in enumerate(parameters) if p.kind == _BY_BOTH}
        if names is None:
            counted = [n + len(parameters) if n < 0 else n for n in by_number]
            by_name = tuple(named[n] for n in counted if n in named)
        elif numbers is None:
            by_number = tuple(n for n, name in named.items() if name in by_name)
        return cls(by_number, by_name)

    def keys(self, count: int) -> set[int | str]:
        """Returns numbers and names in one set; n < 0 is n + `count`, the positional arguments."""
        return {*(n + count if n < 0 else n for n in self.numbers), *self.names}


Parameters = Sequence[inspect.Parameter]


def parameter_names(parameters: Parameters, count: int) -> tuple[str, ...]:
    """Returns the names of `count` positional arguments: ("x", "y", "arg2") for parameters x, y."""
    found = [p.name for p in parameters[:count]]
    return (*found, *[f"arg{number}" for number in range(len(found), count)])


def parameters_of(fn: Any) -> Parameters:
    """Returns the parameters in a callable's signature; none if it has no signature."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return []


def function_name(fn: Any) -> str:
    """Returns the `__name__` of the function inside wrappers; of other callables their class's."""
    fn = _written(fn)
    return str(getattr(fn, "__name__", type(fn).__name__))


def function_place(fn: Any) -> tuple[str, str] | None:
    """Returns (file, qualified name) of the Python code inside a callable; None if it has none."""
    fn = _written(fn)
    call = fn if hasattr(fn, "__code__") else _written(type(fn).__call__)
    code = getattr(call, "__code__", None)
    return (code.co_filename, code.co_qualname) if code else None


def _written(fn: Any) -> Any:
    """Returns the user's function inside of `functools.partial`s and decorators."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.unwrap(fn)


class Argument(NamedTuple):
    """A non-static argument of a call: its number or keyword, name, pytree, and if donated."""

    key: int | str  # its number among the call's positional ones, or its name if passed by name
    name: str
    value: Any  # its pytree
    is_donated: bool  # whether the results may take its memory


def leaf_names(parts: Sequence[Argument]) -> tuple[str, ...]:
    """Returns a name for each leaf: its parameter's name and its path, `params/w_in`."""
    return tuple(
        "/".join(filter(None, (part.name, path_name(path))))
        for part in parts
        for path, _ in jax.tree_util.tree_flatten_with_path(part.value)[0]
    )


def donated_leaves(parts: Sequence[Argument]) -> tuple[int, ...]:
    """Returns the flat indices, among all arguments' leaves, of those of donated arguments."""
    flags = [part.is_donated for part in parts for _ in jax.tree.leaves(part.value)]
    return tuple(i for i, is_donated in enumerate(flags) if is_donated)


def updates_of(parts: Sequence[Argument], out_tree: Any) -> tuple[tuple[int, int], ...]:
    """Returns pairs of leaf numbers: (of a result, of the donated argument that it replaces).

    `out_tree` is the result's pytree of structs. A donated argument is paired with its first
    unpaired subtree of equal structure, shapes and dtypes, else leaf by leaf if possible. If
    `step(params, batch)` returns (loss, params), and `params = {"w": ..}` is donated: ((1, 0),).
    """
    counts = [len(jax.tree.leaves(part.value)) for part in parts]
    starts = np.cumsum([0, *counts]).tolist()
    places_of = zip(parts, starts, strict=False)
    donated = [(part.value, position) for part, position in places_of if part.is_donated]
    if not donated:
        return ()
    places: dict[Any, list[int]] = {}
    for tree, start in _subtrees(out_tree):
        places.setdefault(_tree_type(tree), []).append(start)
    links: dict[int, int] = {}

    def is_linked(tree: Any, position: int) -> bool:
        count = len(jax.tree.leaves(tree))
        for start in places.get(_tree_type(tree), ()):
            if links.keys().isdisjoint(range(start, start + count)):
                links.update((start + k, position + k) for k in range(count))
                return True
        return False

    alone = [tree for tree in donated if not is_linked(*tree)]
    for tree, position in alone:
        for k, leaf in enumerate(jax.tree.leaves(tree)):
            is_linked(leaf, position + k)
    return tuple(links.items())


def _subtrees(tree: Any) -> Iterator[tuple[Any, int]]:
    """Yields (subtree, number of its first leaf) for a tree and all its subtrees, outer first."""
    level = [(tree, 0)]
    while level:
        yield from level
        inner = []
        for outer, start in level:
            for child in (jax.tree_util.default_registry.flatten_one_level(outer) or ((),))[0]:
                inner.append((child, start))
                start += len(jax.tree.leaves(child))
        level = inner


def _tree_type(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


# Specs: as users give them, and spelled out with an entry for each dim.

Specs = Sequence[Any] | Mapping[str, Any] | None
"""A spec for each argument or result in order, None if open; or a mapping: name pattern -> spec."""


def arg_specs(
    in_specs: Any, parts: Sequence[Argument], parameters: Parameters, positional: int
) -> list[Any]:
    """Returns the spec of each leaf of the arguments `parts`; None for a leaf that is open.

    `in_specs` is one `PartitionSpec` or `NamedSharding` for all, or has an entry for each parameter
    or, as for `jax.jit`, for each positional argument that is not static: a spec, a pytree of specs
    that is a prefix of the argument, or None. `positional` is how many arguments, static ones too,
    are passed by position. SpecError: another number of entries or structure, an ambiguous spec.
    """
    if in_specs is None or isinstance(in_specs, PartitionSpec | NamedSharding):
        return [in_specs for part in parts for _ in jax.tree.leaves(part.value)]
    own = [p.name for p in parameters if p.kind in (_BY_BOTH, inspect.Parameter.POSITIONAL_ONLY)]
    numbers: dict[int | str, int] = {name: number for number, name in enumerate(own)}
    # Of each argument the number of its parameter, or its name if that has no place.
    every = [numbers.get(part.key, part.key) for part in parts]
    places = [place for place in every if isinstance(place, int)]
    least = max([positional, *(place + 1 for place in places)])
    most = max(least, len(own))  # those left out have defaults
    entries: dict[int | str, Any]
    if isinstance(in_specs, tuple | list) and least <= len(in_specs) <= most:
        entries = dict(enumerate(in_specs))
    elif isinstance(in_specs, tuple | list) and len(in_specs) == len(places):
        entries = dict(zip(places, in_specs, strict=True))
    else:
        names = parameter_names(parameters, least)
        fix = "write None for an argument that is open"
        if len(names) == 1 and _is_spec(in_specs):
            fix = f"put it into a tuple: in_specs=({described(in_specs)},)"
        raise spec_error(
            "in_specs needs one entry for each positional argument",
            actual=f"in_specs={described(in_specs)}",
            required=f"{len(names)}, for {some_of(names)}" if names else "none: in_specs=()",
            fix=fix,
        )
    return [
        spec
        for part, place in zip(parts, every, strict=True)
        for spec in _spread(entries.get(place), part.value, f"argument {part.name}")
    ]


def result_specs(out_specs: Any, out_tree: Any) -> list[Any]:
    """Returns the spec of each leaf of the result, None if open; SpecError if they do not match."""
    return _spread(out_specs, out_tree, "the result", is_outermost=True)


def _spread(specs: Any, tree: Any, what: str, is_outermost: bool = False) -> list[Any]:
    """Returns one spec for each leaf of `tree`, given a prefix pytree of specs.

    If `tree` is a tuple or list, a tuple of as many specs has one for each part. If it may also be
    one spec for all parts, as ("data", None), it is a SpecError; not if `is_outermost`, though. For
    (x, {"a": y, "b": z}) the specs (P("data"), None) become [P("data"), None, None].

    Specs go by path, not by jax's tree structures, which differ as static parts do: an optimizer,
    for example, is another object each time it is made. SpecError, naming the tree by `what`: a
    leaf without a spec, or a spec without a leaf.
    """
    are_tuples = {type(tree), type(specs)} <= {tuple, list}
    if are_tuples and len(specs) == len(tree) and all(map(_is_spec, specs)):
        # As many names as there are parts may also be one spec of every part's dims.
        names = [] if is_outermost else [entry for entry in specs if entry is not None]
        are_names = names and all(isinstance(entry, str | int) for entry in names)
        if are_names and all(len(specs) <= np.ndim(leaf) for leaf in jax.tree.leaves(tree)):
            apart = ", ".join("None" if entry is None else f"P({entry!r})" for entry in specs)
            one = ", ".join(map(repr, specs))
            raise spec_error(
                f"the spec of {what} can be read in two ways: it has {len(specs)} parts",
                actual=repr(specs),
                required="one spec for all parts, or one for each",
                fix=f"with jax.sharding.PartitionSpec as P, write P({one}) for all, or ({apart}) "
                "for each",
            )
        return [spec for pair in zip(specs, tree, strict=True) for spec in _spread(*pair, what)]
    if _is_spec(specs) or jax.tree_util.all_leaves([specs]):
        return [specs] * len(jax.tree.leaves(tree))
    given = dict(_by_path(specs, lambda _, spec: _is_spec(spec)))
    parts = dict(_by_path(tree, lambda path, _: _names(path) in given))
    unknown = [path for path in given if path not in parts]
    without = [path for path in parts if path not in given]
    # A spec of no leaves may be `None` or `()`, which is an empty node, too.
    if not without and all(given[path] in (None, ()) for path in unknown):
        return [spec for path in parts for spec in _spread(given[path], parts[path], what)]
    actual = [f"specs for {_some_paths(unknown)}, which it does not have"] if unknown else []
    actual += [f"no spec for {_some_paths(without)}"] if without else []
    raise spec_error(
        f"the specs of {what} don't match its structure",
        actual="; ".join(actual),
        required=f"specs for {_some_paths(path for path, _ in _by_path(tree, None))}",
        fix="give a spec for each leaf, or one for a whole branch; None leaves it open",
    )


def _by_path(tree: Any, is_leaf: Callable[[Any, Any], bool] | None) -> list[tuple[Any, Any]]:
    """Returns (path, leaf) of each leaf, as (("w", "0"), x); `is_leaf(path, node)` is as in jax."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf, is_leaf_takes_path=True)
    return [(_names(path), leaf) for path, leaf in found]


def _names(path: Sequence[Any]) -> tuple[str, ...]:
    return tuple(path_name([key]) for key in path)


def _some_paths(paths: Iterable[Sequence[str]]) -> str:
    return some_of(["/".join(path) or "itself" for path in paths]) or "no arrays"


def _is_spec(x: Any) -> bool:
    if x is None or isinstance(x, PartitionSpec | Sharding | str):
        return True
    return type(x) in (tuple, list) and all(
        e is None or e is ... or isinstance(e, str | int) or e is OPEN
        or (type(e) in (tuple, list) and all(isinstance(n, str | int) for n in e))
        for e in x
    )  # fmt: skip


def key_dtype(leaf: Any) -> Any:
    """Returns the dtype of a key array (`jax.random.key`) or a struct of one; None for all else."""
    dtype = getattr(leaf, "dtype", None)
    return dtype if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) else None


def mesh_sharding(leaf: Any) -> NamedSharding | None:
    """Returns the `NamedSharding` of an array or struct; None if it has none, or is uncommitted."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return None if isinstance(leaf, jax.Array) and not leaf.committed else sharding


def placement(leaf: Any, mesh: Mesh) -> NamedSharding | None:
    """Returns `mesh_sharding(leaf)`, but None if it replicates over a mesh with other axes."""
    sharding = mesh_sharding(leaf)
    if sharding is None or not sharding.is_fully_replicated:
        return sharding
    other = as_mesh(sharding.mesh)
    return sharding if (other.axis_names, other.sizes) == (mesh.axis_names, mesh.sizes) else None


def leaf_entries(spec: Any, leaf: Any, what: str, mesh: Mesh) -> Entries | None:
    """Returns the axis names of each dim of an argument or result, as (("data",), (), None).

    An open dim is None. If `spec` is None, so is all; a leaf without elements is not split then.
    A key array has one dim more, that of its data. Errors name the leaf by `what`. MeshError: a
    sharding on a mesh whose axes are not made of axes of `mesh`; SpecError: a spec does not fit.
    """
    source, own, shape = caller(), mesh, np.shape(leaf)
    if spec is None:
        if 0 not in shape:
            return None
        spec = ((),) * len(shape)  # XLA for CPUs crashes where a piece has no elements, in jax 0.11

    def axes_here(names: Sequence[str]) -> tuple[str, ...]:
        """Returns the program mesh's axes, or parts (`x:(2)4`), for axes of the spec's own mesh."""
        atoms = tuple(a for name in names for a in part_atoms(mesh, own, name))
        return tuple(str(ref) for ref in axis_refs(atoms, mesh))

    if isinstance(spec, NamedSharding):
        check_memory(spec, what)
        spec, own = spec.spec, mesh_of(spec, mesh)
    entries = spec_entries(spec, len(shape), own, what=what, source=source)
    try:
        if own is not mesh:
            entries = tuple(None if names is None else axes_here(names) for names in entries)
    except MeshError as error:
        fields = {"actual": f"{what} lies on {error.actual}", "required": error.required}
        raise MeshError(error.what, source=source, fix=error.fix, **fields) from None
    dims_of(entries, shape, mesh, what=what, source=source)
    return entries if key_dtype(leaf) is None else (*entries, ())


def mesh_of(sharding: NamedSharding, mesh: Mesh) -> Mesh:
    """Returns a sharding's mesh: `mesh` if equal; one without devices gets those of `mesh`."""
    other = numbered_as(sharding.mesh, mesh)
    same = (other.axis_names, other.sizes, other.device_ids)
    return mesh if same == (mesh.axis_names, mesh.sizes, mesh.device_ids) else other


def is_in_host(spec: Any) -> bool:
    """Whether a spec or sharding says that an array lies in the host's memory."""
    return isinstance(spec, NamedSharding) and spec.memory_kind == HOST


def check_memory(sharding: NamedSharding, what: str) -> None:
    """Raises SpecError, about `what`, if a sharding's memory is none of a device or its host."""
    if sharding.memory_kind not in (None, "device", "unpinned_host", HOST):
        raise spec_error(
            f"{what} is to lie in {sharding.memory_kind}",
            actual=str(sharding),
            required=f"a memory that devices have: device or {HOST}",
            fix="name one of them",
        )


def like_parameters(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], entries: Sequence[E | None]
) -> tuple[tuple[E | None, ...], tuple[str | None, ...]]:
    """Returns (specs, reasons) of leaves: an open one gets the spec of a marked one it mirrors.

    Optimizer state mirrors parameters: `opt_state/0/mu/w_in` has the shape of `params/w_in` and its
    path at the end, so it gets its spec and the reason "like argument params/w_in". Others keep
    theirs (None if open) and have the reason None. Propagation alone would split the state of a
    parameter marked as not split.
    """
    paths = [tuple(name.split("/"))[1:] for name in names]
    marked: dict[tuple[tuple[str, ...], Any], int] = {}
    for i, path in enumerate(paths):
        if entries[i] is not None and path:
            marked.setdefault((path, shapes[i]), i)
    filled = list(entries)
    reasons: list[str | None] = [None] * len(filled)
    for i, path in enumerate(paths):
        tails = ((path[k:], shapes[i]) for k in range(1, len(path)))
        like = next((marked[tail] for tail in tails if tail in marked), None)
        if entries[i] is None and like is not None:
            filled[i] = entries[like]
            reasons[i] = f"like argument {names[like]}"
    return tuple(filled), tuple(reasons)


def one_for_each(given: Any, names: Sequence[str], option: str, what: str) -> list[Any]:
    """Returns the entry of `given` for each of `names`, None for those that have none.

    `given` is a sequence in their order, a mapping from names or glob patterns, or None. SpecError,
    with `option` and `what` in its text: a pattern of no name, or a sequence of another length.
    """
    if isinstance(given, Mapping):
        found = match_patterns(given, names, what=what, source=caller())
        return [None if pattern is None else given[pattern] for pattern in found]
    if given is not None and len(given) != len(names):
        raise spec_error(
            f"{option} needs one entry for each {what}",
            actual=f"{len(given)} entries",
            required=f"{len(names)}: {some_of(names)}",
            fix="write None where nothing is to be said",
        )
    return list(given or [None] * len(names))
