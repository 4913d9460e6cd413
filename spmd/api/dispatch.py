"""Calls that run without Python: jax's C++ dispatch, which is given our compiled programs.

jax looks up a program by the arguments' structure, types, shardings and static values and its own
settings, and runs it; our Python is called where there is none. None of this is public in jax, so
all uses are in this file. In a version of jax without it our Python runs at each call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

try:
    from jax._src import api_util, config, tree_util
    from jax._src.interpreters import pxla
    from jaxlib import _jax

    ARRAY: Any = _jax.ArrayImpl
    NAN_FOUND: Any = api_util.InternalFloatingPointError
    HAS_FAST_PATH = hasattr(_jax, "pjit") and hasattr(_jax, "PjitFunctionCache")
except (ImportError, AttributeError):  # another version of jax
    ARRAY = jax.Array
    NAN_FOUND = FloatingPointError
    HAS_FAST_PATH = False

# `ARRAY` is the class of arrays that are not key arrays. `NAN_FOUND` is what a compiled program
# raises under `jax_debug_nans`.

KINDS = 1024  # how many kinds of call of one function are kept

Miss = Callable[..., tuple[Any, Any]]
"""Runs a call that jax knows no program for; returns (result, what `known` returned or None)."""


def dispatched(
    fn: Callable[..., Any],
    miss: Miss,
    static_argnums: Sequence[int],
    static_argnames: Sequence[str],
    donated: Sequence[int | str],
) -> Callable[..., Any]:
    """Returns `fn` under jax's C++ dispatch: `miss` runs the calls for which it knows no program.

    Those have new types, shardings, static values or settings of jax. `donated` are the numbers and
    names of donated arguments. Under `jax.disable_jit` the function `fn` itself runs.
    """
    if not HAS_FAST_PATH:
        return _plain(fn, miss)

    def serve(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        return (*miss(*args, **kwargs), False)

    try:
        return _jax.pjit(  # type: ignore[no-any-return]
            getattr(fn, "__name__", type(fn).__name__),
            fn,
            serve,
            tuple(static_argnums),
            tuple(static_argnames),
            tuple(donated),
            tree_util.dispatch_registry,
            pxla.cc_shard_arg,
            _jax.PjitFunctionCache(capacity=KINDS),  # goes when the function goes
        )
    except TypeError:
        return _plain(fn, miss)


def _plain(fn: Callable[..., Any], miss: Miss) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_set("disable_jit"):
            return fn(*args, **kwargs)
        return miss(*args, **kwargs)[0]

    return call


def known(executable: Any, results: Sequence[Any], out_tree: Any) -> Any:
    """Returns what jax's dispatch needs to run a program without Python; None if Python has to."""
    if not HAS_FAST_PATH or _is_set("debug_nans") or _is_set("debug_infs"):
        return None
    try:
        program = executable._executable
        run = program.unsafe_call
        # A key array is an object around a plain one.
        is_plain = all(type(result) is ARRAY for result in results)
        if run.ordered_effects or run.has_unordered_effects or not is_plain:
            return None
        return pxla.MeshExecutableFastpathData(
            program.xla_executable,
            out_tree,
            program._in_shardings,
            program._out_shardings,
            [result.aval for result in results],
            [True] * len(results),
            [i in program._kept_var_idx for i in range(len(program.in_avals))],
            program._dispatch_in_layouts,
            list(getattr(executable, "constants", ())),  # in front of its flat arguments
        )
    except (AttributeError, TypeError):
        return None


def _is_set(name: str) -> bool:
    return bool(getattr(jax.config, f"jax_{name}"))


def settings() -> Any:
    """Returns this thread's settings of jax that decide how a function is traced, as a dict key."""
    mesh = jax.sharding.get_abstract_mesh()
    try:
        return mesh, config.trace_context()
    except (NameError, AttributeError):
        names = ("enable_x64", "default_matmul_precision", "numpy_dtype_promotion")
        return mesh, tuple(getattr(jax.config, f"jax_{name}") for name in names)
