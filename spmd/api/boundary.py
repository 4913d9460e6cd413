"""Where a compiled program takes its arguments and leaves its results.

The program itself has only arrays on its own mesh: key arrays are their data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from spmd.api.specs import key_dtype, mesh_sharding
from spmd.api.tracing import Interface, order_of
from spmd.ir.types import numpy_dtype
from spmd.lowering.emitted import Emitted, Placement, formats
from spmd.lowering.execute import x64_if


class Boundary:
    """Flat arguments and results of a compiled program.

    Attributes:
      arguments, results: their shardings.
      argument_formats, result_formats: with their layouts, where these have orders of their own.
      seen_arguments, seen_results: the same as callers see them, who have key arrays.
    """

    def __init__(self, interface: Interface, emitted: Emitted, mesh: JaxMesh) -> None:
        self.arguments = emitted.argument_shardings(mesh)
        results = emitted.result_shardings(mesh)
        ranks = [len(type_.shape) for type_ in emitted.result_types]
        specs = interface.out_specs or (None,) * len(results)
        self.results = tuple(map(_as_told, results, specs, ranks))
        self.argument_formats = formats(self.arguments, emitted.argument_orders)
        self.result_formats = formats(self.results, emitted.result_orders)
        self._orders = emitted.argument_orders
        self._needs_x64 = emitted.needs_x64
        self._dtypes = [numpy_dtype(type_.dtype) for type_ in emitted.argument_types]
        self._key_dtypes = interface.key_dtypes
        dtypes = [key_dtype(struct) for struct in interface.out_structs]
        self._key_results = [(i, dtype) for i, dtype in enumerate(dtypes) if dtype is not None]
        argument_ranks = [len(type_.shape) for type_ in emitted.argument_types]
        given = zip(self.argument_formats, self._key_dtypes, argument_ranks, strict=True)
        self.seen_arguments = tuple(_seen(*one) for one in given)
        self.seen_results = tuple(
            _seen(*one) for one in zip(self.result_formats, dtypes, ranks, strict=True)
        )
        # As it came the last time: an argument with the very same object needs no look at it.
        self._known: list[Any] = [object()] * len(self.arguments)

    @property
    def has_keys(self) -> bool:
        """Whether an argument or a result is a key array."""
        return bool(self._key_results) or any(dtype is not None for dtype in self._key_dtypes)

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether arguments placed on a mesh lie as this program wants them."""
        return all(
            self._lies_right(index, leaf)
            or mesh_sharding(leaf) is None
            or self._key_dtypes[index] is not None
            for index, leaf in enumerate(leaves)
        )

    def take(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The arguments as the program wants them: those that lie elsewhere are placed."""
        elsewhere = [i for i, leaf in enumerate(leaves) if not self._lies_right(i, leaf)]
        taken = list(leaves)
        if elsewhere:
            data = [self._on_host(i, self._data(i, leaves[i])) for i in elsewhere]
            with x64_if(self._needs_x64):  # else jax narrows 64-bit elements on the way in
                placed = jax.device_put(data, [self.argument_formats[i] for i in elsewhere])
            for index, leaf in zip(elsewhere, placed, strict=True):
                taken[index] = leaf
        return taken

    def in_other_layouts(self, taken: Sequence[Any]) -> list[int]:
        """Which of the arguments, as `take` gave them, lie in memory in another order."""
        return [i for i, leaf in enumerate(taken) if order_of(leaf) != self._orders[i]]

    def laid_out(
        self, taken: Sequence[Any], which: Sequence[int], donated: Sequence[int] = ()
    ) -> list[Any]:
        """Arguments as `take` gave them, `which` of them moved into the program's order in memory.

        One after the other: of what is donated there is never a second copy but of one argument.
        """
        laid = list(taken)
        for index in which:
            leaf, wanted = laid[index], self.arguments[index]
            order = self._orders[index] or tuple(range(leaf.ndim))
            laid[index] = jax.device_put(leaf, Format(Layout(order), wanted))
            if index in donated:
                leaf.delete()
        return laid

    def hand_back(self, results: list[Any]) -> list[Any]:
        """The program's results as the function returns them."""
        for index, dtype in self._key_results:
            results[index] = jax.random.wrap_key_data(results[index], impl=dtype)
        return results

    def data(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments with the data of key arrays in their place."""
        return [self._data(index, leaf) for index, leaf in enumerate(leaves)]

    def _data(self, index: int, leaf: Any) -> Any:
        return leaf if self._key_dtypes[index] is None else jax.random.key_data(leaf)

    def _on_host(self, index: int, leaf: Any) -> Any:
        """A value of numpy or Python as jax narrows it: 64 bits become 32 if they are not kept."""
        if isinstance(leaf, jax.Array):
            return leaf
        wanted = self._dtypes[index]
        is_narrowed = jax.dtypes.canonicalize_dtype(np.result_type(leaf)) == wanted
        return np.asarray(leaf, wanted) if is_narrowed else leaf

    def _lies_right(self, index: int, leaf: Any) -> bool:
        """Whether an argument lies as the program wants it; the next time it is known to."""
        have = getattr(leaf, "sharding", None)
        if have is self._known[index]:
            return True
        if self._key_dtypes[index] is not None or not isinstance(have, NamedSharding):
            return False
        if not have.is_equivalent_to(self.arguments[index], leaf.ndim):
            return False
        self._known[index] = have
        return True


def _seen(placed: Placement, dtype: Any, rank: int) -> Format:
    """Where an array lies; a key array lacks the last dim of its data, and has their order."""
    if dtype is None:
        return placed if isinstance(placed, Format) else Format(None, placed)
    sharding = placed.sharding if isinstance(placed, Format) else placed
    assert isinstance(sharding, NamedSharding)
    entries = (*sharding.spec, *[None] * rank)[: rank - 1]
    kind = sharding.memory_kind
    return Format(None, NamedSharding(sharding.mesh, PartitionSpec(*entries), memory_kind=kind))


def _as_told(planned: NamedSharding, spec: PartitionSpec | None, rank: int) -> NamedSharding:
    """A result's sharding in the user's words, where these mean the same.

    The program knows no axes of size 1, which are parts of jax's types nevertheless.
    """
    if spec is None or PartitionSpec.UNCONSTRAINED in spec:
        return planned
    if not set(jax.tree.leaves(tuple(spec))) <= set(planned.mesh.axis_names):
        return planned  # it is on another mesh of the same devices
    told = NamedSharding(planned.mesh, spec)
    return told if told.is_equivalent_to(planned, rank) else planned
