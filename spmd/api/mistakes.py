"""What is wrong with a call, in words: each function makes or raises one error."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from operator import methodcaller
from typing import Any

import jax

from spmd.api.marks import caller, path_name, some_of
from spmd.api.parameters import function_name, parameter_names
from spmd.errors import ArgumentError, MeshError, described
from spmd.ir.types import TensorType, numpy_dtype
from spmd.options import Options

_is_deleted = methodcaller("is_deleted")


def check_jit(fn: Any, options: Any, device: Any, backend: Any) -> None:
    """Holds that `jit` was given a function and options, and no device."""
    if not callable(fn):
        raise ArgumentError(
            "spmd.jit needs the function first",
            source=caller(),
            actual=described(fn),
            fix="write spmd.jit(fn, mesh=mesh), or @spmd.jit(mesh=mesh)",
        )
    if options is not None and not isinstance(options, Options):
        raise ArgumentError(
            f"the options of spmd.jit are a {type(options).__name__}",
            source=caller(),
            actual=described(options),
            required="a spmd.Options",
            fix="write options=spmd.Options(memory_limit=16 << 30), or leave them out",
        )
    for name, value in (("device", device), ("backend", backend)):
        if value is not None:
            raise ArgumentError(
                f"spmd.jit has no {name}: a program runs on the devices of its mesh",
                source=caller(),
                actual=f"{name}={described(value)}",
                fix="pass mesh=spmd.make_mesh(data=4, devices=jax.devices(...))",
            )


def one_of(specs: Any, shardings: Any, name: str) -> Any:
    """The specs that `jit` was given under one of two names; None if under neither, never both."""
    if specs is not None and shardings is not None:
        raise ArgumentError(
            f"spmd.jit was given {name}_specs and {name}_shardings, which are the same",
            source=caller(),
            fix="leave one of them out",
        )
    return shardings if specs is None else specs


def no_mesh(name: str) -> MeshError:
    """The error of a program for which no mesh was found."""
    actual = "no mesh= was given, no argument is placed on a mesh, nothing is marked"
    fix = "pass mesh=spmd.make_mesh(data=4, model=2), or call it under jax.set_mesh(mesh)"
    return MeshError(f"spmd.jit of {name} has no mesh", source=caller(), actual=actual, fix=fix)


def warning_of_changes(fn: Any, arguments: Any) -> Any:
    """A function that warns, when it is traced, of objects among its arguments that it changes.

    They are copies: what a traced function does to its arguments and does not return is lost. Where
    there are no objects among `arguments`, a pytree, it is `fn` itself: then jax finds a trace that
    it has made before, as by `jax.eval_shape`, and what a result holds beside arrays (an optimizer
    that `fn` makes) is the same object as there.
    """
    if jax.tree_util.all_leaves(jax.tree.leaves(arguments, is_leaf=_is_object)):
        return fn

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        objects = jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=_is_object)
        before = [jax.tree.leaves(value) for _, value in objects]
        results = fn(*args, **kwargs)
        returned = set(map(id, jax.tree.leaves(results)))
        for (path, value), had in zip(objects, before, strict=True):
            has = jax.tree.leaves(value)
            if len(has) < len(had) or {*map(id, has)} - {*map(id, had)} - returned:
                kind = type(value).__name__
                warnings.warn(
                    f"{function_name(fn)} changes argument {_told(fn, path)}, a {kind}, which is "
                    "lost when it returns: return it, or, for modules of flax.nnx, use "
                    "spmd.nnx.jit, which updates them in place",
                    stacklevel=2,
                )
        return results

    call.__name__ = function_name(fn)
    return call


def _is_object(value: Any) -> bool:
    """Whether a pytree is of a class of its own: people change these, as they do modules."""
    return type(value) not in (tuple, list, dict, type(None))


def _told(fn: Any, path: Sequence[Any]) -> str:
    """An argument's name from its path in (positional, named)."""
    kind, first, *rest = path
    head = parameter_names(fn, first.idx + 1)[first.idx] if kind.idx == 0 else str(first.key)
    return "/".join(filter(None, (head, path_name(rest))))


def check_concrete(name: str, leaves: Sequence[Any]) -> None:
    """Holds that a compiled program is called with values, and not by a transformation of jax."""
    tracer = next((leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)), None)
    if tracer is None:
        return
    raise ArgumentError(
        f"a transformation of jax is around the compiled program {name}",
        source=caller(),
        actual=f"an argument is a {type(tracer).__name__}, which has no values yet",
        required="values: what is compiled cannot be transformed",
        fix="call the spmd.jit function itself, which can, or transform first, as in "
        f"spmd.jit(jax.grad({name}), mesh=mesh)",
    )


def no_values(name: str, argument: str, struct: Any) -> ArgumentError:
    """The error of a call with a shape where the program needs an array."""
    return ArgumentError(
        f"argument {argument} of {name} has no values",
        source=caller(),
        actual=described(struct),
        required="an array: the program reads it",
        fix="pass an array, or compile without running by .compile(...), which takes structs",
    )


def check_once(names: Sequence[str], arrays: Sequence[Any], donated: Sequence[int]) -> None:
    """Holds that no donated array is given twice: jax's CPU runtime ends the process then."""
    seen: dict[int, int] = {}
    for index, array in enumerate(arrays):
        first = seen.setdefault(id(array), index)
        if first == index or not {first, index} & set(donated):
            continue
        one, again = names[first], names[index]
        raise ArgumentError(
            f"one array is given as argument {one} and as argument {again}, and it is donated",
            source=caller(),
            required="a donated array is given once: its memory is taken over",
            fix=f"pass a copy of one, as in {one}.copy(), or donate nothing",
        )


def check_alive(names: Sequence[str], arrays: Sequence[Any]) -> None:
    """Holds that no argument was deleted: jax's CPU runtime ends with a segmentation fault then."""
    if not any(map(_is_deleted, arrays)):
        return
    gone = [name for name, array in zip(names, arrays, strict=True) if array.is_deleted()]
    raise ArgumentError(
        f"argument {some_of(gone)} was deleted: an earlier call took its memory (donate_argnums)",
        source=caller(),
        fix="go on with what that call returned, as in params = step(params), or donate nothing",
    )


def check_types(names: Sequence[str], types: Sequence[TensorType], leaves: Sequence[Any]) -> None:
    """Holds that arguments have the types that a program was compiled for."""
    for name, type_, leaf in zip(names, types, leaves, strict=True):
        have = jax.typeof(leaf)
        if tuple(have.shape) == type_.shape and have.dtype == numpy_dtype(type_.dtype):
            continue
        raise ArgumentError(
            f"argument {name} has another type than the program was compiled for",
            source=caller(),
            actual=described(have),
            required=f"a {numpy_dtype(type_.dtype).name} array of shape {type_.shape}",
            fix="compile again for it, or call the spmd.jit function, which does so by itself",
        )
