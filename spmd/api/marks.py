"""Marks: the shardings that users give tensors, inside traced code and outside of it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from spmd.errors import ArgumentError, MeshError, SpecError, SpmdError, described
from spmd.frontend.marks import Entries
from spmd.frontend.trace import mark_uneven, note_mesh
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding, is_legal
from spmd.mesh.spec import (
    OPEN,
    as_mesh,
    dims_of,
    has_explicit_axes,
    jax_mesh,
    match_patterns,
    spec_entries,
)

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
E = TypeVar("E", bound=SpmdError)
AnyMesh = jax.sharding.Mesh | AbstractMesh  # of which a `spmd.Mesh` is the first
Spec = PartitionSpec | Sequence[Any] | str | int | None
Rules = Mapping[str, Spec]
Array = jax.Array | np.ndarray[Any, Any]


@overload
def mark_sharding(t: jax.ShapeDtypeStruct, mesh: AnyMesh, spec: Spec) -> jax.ShapeDtypeStruct: ...
@overload
def mark_sharding(t: ArrayLike, mesh: AnyMesh, spec: Spec) -> jax.Array: ...
def mark_sharding(t: Any, mesh: Any, spec: Any) -> Any:
    """Returns a tensor marked with the sharding that it is to have on a mesh.

    A tracer gets jax's own sharding constraint, so the same program runs under plain `jax.jit`, and
    its gradient gets the same mark. An array is placed so. A `ShapeDtypeStruct` gets the sharding.

    Args:
      t: a tracer, an array or a `ShapeDtypeStruct`.
      mesh: a `spmd.Mesh`, or jax's `Mesh` or `AbstractMesh`.
      spec: one entry for each dim: an axis name, a mesh-axis index, a tuple of these (major to
        minor), `None` (not split), or `...` (up to the compiler). Dims beyond it are not split.

    Returns:
      The marked tensor.

    Raises:
      SpecError: not one tensor (`mark_tree` marks pytrees), an unknown axis, an axis used twice, a
        spec longer than the rank, an axis that is manual in the `jax.shard_map` around, or, outside
        of traced code, a dim that its axes don't divide (inside, its pieces are padded).
      MeshError: `t` is a mesh, or an array to be placed on devices that are not there.

    Example:
      >>> w = mark_sharding(w, mesh, ("data", "model"))
    """
    if isinstance(t, Mesh | AbstractMesh | jax.sharding.Mesh):
        raise mesh_error(
            "a mesh stands where the tensor belongs",
            fix="write mark_sharding(tensor, mesh, spec), in this order",
        )
    if not hasattr(t, "shape") and not isinstance(t, complex | float | int):
        paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(t)]
        if paths in ([], [""]):
            raise spec_error(f"{described(t)} is not a tensor", fix="mark an array")
        raise spec_error(
            f"mark_sharding marks one tensor, and this {type(t).__name__} holds {len(paths)}",
            actual=f"leaves: {some_of(paths)}",
            fix=f"mark leaves by path: mark_tree(tree, mesh, {{{paths[0]!r}: {described(spec)}}})",
        )
    own = as_mesh(mesh)
    shape = tuple(np.shape(t))
    what = f"a tensor of shape {shape}"
    entries = spec_entries(spec, len(shape), own, what=what, source=caller())
    if isinstance(t, jax.core.Tracer):
        return _constrain(t, own, entries, what)
    dims_of(entries, shape, own, what=what, source=caller())
    if isinstance(t, jax.ShapeDtypeStruct):
        sharding = _open_sharding(own, entries)
        if own.topology is not None:  # jax's `AbstractMesh` does not tell it
            sharding = NamedSharding(own, sharding.spec)
        return jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=sharding)
    closed = PartitionSpec(*(entry or () for entry in entries))
    return jax.device_put(t, NamedSharding(jax_mesh(own), closed))


# Arrays of numpy become jax's: of what such trees are is told where it can be said.
@overload
def mark_tree(tree: Mapping[K, Array], mesh: AnyMesh, rules: Rules) -> dict[K, jax.Array]: ...
@overload
def mark_tree(tree: dict[K, dict[str, V]], mesh: AnyMesh, rules: Rules) -> dict[K, Any]: ...
@overload
def mark_tree(tree: T, mesh: AnyMesh, rules: Rules) -> T: ...
def mark_tree(tree: Any, mesh: Any, rules: Rules) -> Any:
    """Returns a pytree with its leaves marked by path, each as `mark_sharding` marks it.

    Args:
      tree: a pytree of tensors.
      mesh: the mesh.
      rules: glob pattern over the leaf's path (keys joined by `/`; `*` also crosses `/`) -> spec.
        The first pattern that matches a leaf counts; leaves that none matches are left alone.

    Raises:
      SpecError: a pattern that matches no leaf, or a spec that does not fit its leaf.

    Example:
      >>> params = mark_tree(params, mesh, {"*/w_in": ("data", "model"), "*/bias": ()})
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path_name(path) for path, _ in leaves]
    found = match_patterns(rules, paths, what="leaf of the tree", source=caller())
    marked = [
        leaf if pattern is None else mark_sharding(leaf, mesh, rules[pattern])
        for pattern, (_, leaf) in zip(found, leaves, strict=True)
    ]
    return jax.tree_util.tree_unflatten(treedef, marked)


def path_name(path: Sequence[Any]) -> str:
    """Returns a pytree path (of `jax.tree_util`) as text: `layers/0/weight`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def some_of(names: Sequence[str]) -> str:
    """Returns names as text for an error: the first eight, and `...` if there are more."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _constrain(t: Any, mesh: Mesh, entries: Entries, what: str) -> Any:
    """Returns tracer `t` marked by `entries`; SpecError (on `what`): no fit, or a manual axis."""
    first = note_mesh(mesh)
    # The axes along which the code being traced is written for one device.
    around = jax.sharding.get_abstract_mesh()
    own = around.axis_types if tuple(around.axis_names) == mesh.axis_names else ()
    manual = {n for n, type_ in zip(mesh.axis_names, own, strict=False) if type_ == AxisType.Manual}
    for name in (name for entry in entries for name in entry or ()):
        if name in manual:
            raise spec_error(
                f"axis {name!r} splits {what} inside a jax.shard_map over it",
                actual=f"here every device has its own tensor along {name!r} already",
                fix="mark the other axes alone, or mark outside of shard_map",
            )
    if len(manual) == len(mesh.axis_names):
        return t
    dims, _ = dims_of(entries, t.shape, mesh, what=what, source=caller(), even=False)
    # jax refuses dims that their axes don't divide, and meshes with other orders of devices.
    is_plain = is_legal(Sharding(dims), t.shape, mesh) and mesh.device_ids == first.device_ids
    # Where a tracer's type has this mesh's axes, a mark changes the type.
    typed = jax.typeof(t).sharding.mesh
    is_typed = has_explicit_axes(typed) and tuple(typed.shape.items()) == tuple(mesh.shape.items())
    if is_typed and None not in entries and is_plain:
        return jax.sharding.reshard(t, NamedSharding(typed, PartitionSpec(*entries)))
    if is_typed or not is_plain:
        return mark_uneven(t, mesh, entries)
    sharding = _open_sharding(mesh, entries)
    if manual:
        sharding = NamedSharding(around, sharding.spec)
    return jax.lax.with_sharding_constraint(t, sharding)


def _open_sharding(mesh: Mesh, entries: Entries) -> NamedSharding:
    """Returns jax's sharding for spelled-out entries; dims whose entry is None are open."""
    spec = PartitionSpec(*(OPEN if entry is None else entry for entry in entries))
    return NamedSharding(mesh.in_jax, spec)


def caller() -> str | None:
    """Returns the user's line that is running, `file:line (function)`; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("spmd", "jax"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
        frame = frame.f_back
    return None


def _citing(kind: type[E]) -> Callable[..., E]:
    """Returns a function that makes errors of a kind, which cite the `caller` as their source."""
    return lambda what, **fields: kind(what, source=caller(), **fields)


argument_error = _citing(ArgumentError)
mesh_error, spec_error = _citing(MeshError), _citing(SpecError)
