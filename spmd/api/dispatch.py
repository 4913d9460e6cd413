"""Calls that run without Python: jax's C++ dispatch, which is given our compiled programs.

jax looks up a program by the arguments' structure, types, shardings and static values and its own
settings, and runs it; our Python is called where there is none. None of this is public in jax, so
all uses are in this file; it is the same in all versions that `pyproject.toml` names.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import api_util, config, tree_util
from jax._src.interpreters import pxla
from jaxlib import _jax

from spmd.api.arguments import Selected

ARRAY: Any = _jax.ArrayImpl  # the class of arrays that are not key arrays
NAN_FOUND: Any = api_util.InternalFloatingPointError  # of programs, under `jax_debug_nans`
KINDS = 1024  # how many kinds of call of one function are kept

Miss = Callable[..., tuple[Any, Any]]
"""Runs a call that jax knows no program for; returns (result, what `known` returned or None)."""


def dispatched(fn: Callable[..., Any], miss: Miss, static: Selected) -> Callable[..., Any]:
    """Returns `fn` under jax's C++ dispatch: `miss` runs the calls for which it knows no program.

    Those have new types, shardings, static values or settings of jax. Under `jax.disable_jit` the
    function `fn` itself runs.
    """

    def serve(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        return (*miss(*args, **kwargs), False)

    return _jax.pjit(  # type: ignore[no-any-return]
        getattr(fn, "__name__", type(fn).__name__),
        fn,
        serve,
        *static,
        (),  # what else decides; nothing, in a cache of its own
        tree_util.dispatch_registry,
        pxla.cc_shard_arg,
        _jax.PjitFunctionCache(capacity=KINDS),  # goes when the function goes
    )


def known(executable: Any, results: Sequence[Any], out_tree: Any) -> Any:
    """Returns jax's way to run without Python; None for float0, effects, debug_nans/infs."""
    if config.debug_nans.value or config.debug_infs.value:
        return None
    program = executable._executable
    run = program.unsafe_call
    arrays, tree = pxla.reflatten_outputs_for_dispatch(out_tree, results)  # of key arrays the data
    is_plain = all(type(array) is ARRAY for array in arrays)
    if run.ordered_effects or run.has_unordered_effects or not is_plain:
        return None
    return pxla.MeshExecutableFastpathData(
        program.xla_executable,
        tree,
        program._in_shardings,
        program._out_shardings,
        [array.aval for array in arrays],
        [True] * len(arrays),
        [i in program._kept_var_idx for i in range(len(program.in_avals))],
        program._dispatch_in_layouts,
        list(getattr(executable, "constants", ())),  # in front of its flat arguments
    )


def is_misused(args: Any, kwargs: Any, donates: bool) -> bool:
    """Whether an array is deleted, or given twice where some are donated: CPUs' runtime crashes."""
    if config.disable_jit.value:
        return False
    leaves, _ = tree_util.dispatch_registry.flatten((args, kwargs), None)
    arrays = [leaf for leaf in leaves if type(leaf) is ARRAY]
    is_twice = donates and len(set(map(id, arrays))) < len(arrays)
    return is_twice or any(map(ARRAY.is_deleted, arrays))


def without_nan(fn: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """Returns what `fn` does; jax's own error for `jax_debug_nans` becomes a FloatingPointError."""
    try:
        return fn(*args, **kwargs)
    except NAN_FOUND as error:
        raise FloatingPointError(
            f"{name} returned an invalid value ({error}); under jax.disable_jit() it says which "
            "operation made it"
        ) from error


def held(leaf: Any) -> Any:
    """Returns the array that a `jax.Ref` holds now, not a copy of it; anything else as it is."""
    return leaf._refs._buf if isinstance(leaf, jax.Ref) else leaf


def hold(ref: Any, array: Any) -> None:
    """Makes a `jax.Ref` hold another array."""
    ref._refs._buf = array


def settings() -> Any:
    """Returns this thread's settings of jax that decide how a function is traced, as a dict key."""
    return jax.sharding.get_abstract_mesh(), config.trace_context()
