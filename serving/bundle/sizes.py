"""Modules whose symbolic dims stay: what their results' dims are is found by trying sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from serving.bundle.function import BundleError
from spmd.api import static_module
from spmd.frontend.importer.module import parse_module, signature
from spmd.frontend.refine import exported_dims, is_dynamic, stated_dims
from spmd.frontend.sizes import Dim, size_of, symbols_in

FIRST, STEP, LAST = 16, 16, 64
"""Sizes that are tried: multiples of what kernels and constraints like to have."""


@dataclasses.dataclass(frozen=True)
class SizedType:
    """A tensor's type; sizes may be expressions of symbols."""

    dtype: str
    shape: tuple[Dim, ...]


class Read(NamedTuple):
    """A module that was read.

    Attributes:
      module: as it is to be written.
      static: the same, or what it is at some sizes.
      signature: the types of its arguments and results.
      symbols: those that have no size yet.
    """

    module: Any
    static: Any
    signature: tuple[tuple[SizedType, ...], tuple[SizedType, ...]]
    symbols: tuple[str, ...] = ()


def read_module(source: Any, symbols: Mapping[str, int] | None) -> Read:
    """A module at sizes that are given; without any, its symbols stay.

    Args:
      source: as `wrap_stablehlo` takes it.
      symbols: name -> value.

    Raises:
      BundleError: dims of results that are no linear expressions of the symbols.
      SpmdError: a module that cannot be read, or whose dynamic dims have no names.
    """
    exported = source if hasattr(source, "mlir_module_serialized") else None
    module = parse_module(source if exported is None else exported.mlir_module_serialized)
    if symbols or not is_dynamic(module):
        static = static_module(module if exported is None else source, symbols)
        args, results = (tuple(map(_plain, types)) for types in signature(static))
        return Read(static, static, (args, results))
    dims = stated_dims(module) if exported is None else exported_dims(exported)
    stated = [dim for argument in dims for dim in argument if dim is not None]
    names = symbols_in(stated)
    base = dict.fromkeys(names, FIRST)
    given = module if exported is None else source
    static = static_module(given, base)  # which raises where a dim has no name
    types, first = signature(static)
    moved = [_results(given, {**base, name: FIRST + STEP}) for name in names]
    last = dict.fromkeys(names, LAST)
    checked = _results(given, last)
    results = tuple(
        SizedType(
            type_.dtype,
            tuple(
                _fitted([m[i][d] for m in moved], size, names, checked[i][d], last)
                for d, size in enumerate(type_.shape)
            ),
        )
        for i, type_ in enumerate(first)
    )
    args = tuple(
        SizedType(type_.dtype, tuple(dim if dim is not None else 0 for dim in argument))
        for type_, argument in zip(types, dims, strict=True)
    )
    return Read(module, static, (args, results), names)


def _plain(type_: Any) -> SizedType:
    return SizedType(type_.dtype, tuple(type_.shape))


def _results(given: Any, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    return [tuple(type_.shape) for type_ in signature(static_module(given, sizes))[1]]


def _fitted(
    moved: Sequence[int], size: int, names: Sequence[str], checked: int, last: Mapping[str, int]
) -> Dim:
    """The expression of a dim: its size at `FIRST`, and with each symbol larger by `STEP`."""
    slopes = {n: (m - size) // STEP for n, m in zip(names, moved, strict=True) if m != size}
    rest = size - sum(slope * FIRST for slope in slopes.values())
    terms = [name if slope == 1 else f"{slope}*{name}" for name, slope in slopes.items()]
    text = " + ".join([*terms, *([str(rest)] if rest else [])]) if slopes else size
    if size_of(text, last) != checked:
        raise BundleError(
            "a dim of a result is no multiple of a symbol and a number added: give the symbols "
            "sizes"
        )
    return text
