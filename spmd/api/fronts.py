"""What `jit` is made of for frameworks that take a user's objects apart into arrays."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import MethodType
from typing import Any

from spmd.api.jitted import Jitted
from spmd.errors import ArgumentError
from spmd.mesh.topology import Topology


class Front:
    """Base of `nnx.ModuleJit` and `eqx.FilterJit`: a compiled function of objects with arrays.

    ArgumentError, with the advice `fix`, if `options` has one of the names in `lacks`.
    """

    def __init__(
        self, fn: Callable[..., Any], options: Mapping[str, Any], lacks: Sequence[str], fix: str
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        given = [name for name in lacks if options.get(name) is not None]
        if given:
            raise ArgumentError(f"the jit of {type(self).__module__} has no {given[0]}", fix=fix)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled function and returns its result."""
        raise NotImplementedError

    def compile(self, *args: Any, topology: Topology | str | None = None, **kwargs: Any) -> Any:
        """Returns the `Compiled` program for these arguments, for its reports; nothing runs."""
        return self._run(functools.partial(Jitted.compile, topology=topology), args, kwargs)

    def lower(self, *args: Any, topology: Topology | str | None = None, **kwargs: Any) -> Any:
        """Returns the `Lowered` program for these arguments, without XLA; no device is needed."""
        return self._run(functools.partial(Jitted.lower, topology=topology), args, kwargs)

    def _run(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns what `method` of the inner `Jitted` returns for the arrays of these arguments."""
        raise NotImplementedError


def with_keywords(
    call: Callable[..., Any], fn: Any, names: Sequence[str]
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Returns (function, names): a function like `fn` that has more keywords and calls `call`.

    The call is `call(*values, *args, **kwargs)`, with the values of these keywords. Their names are
    `names`, with `_` in front where `fn` has such a parameter. They are last in the signature, so
    that the user's argument numbers and names stay valid.
    """
    signature = inspect.signature(fn)
    free = tuple(
        next(each for n in count() if (each := "_" * n + name) not in signature.parameters)
        for name in names
    )

    @functools.wraps(fn, updated=())
    def with_values(*args: Any, **kwargs: Any) -> Any:
        return call(*map(kwargs.pop, free), *args, **kwargs)

    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in free]
    every = [*signature.parameters.values(), *more]
    every.sort(key=lambda parameter: parameter.kind)
    with_values.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    return with_values, free
