"""Exported functions, compiled for a mesh in this process, without a bundle on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from models.function import Function
from models.gpu_graphs import with_gpu_graphs
from models.placement import Entry, on_mesh
from spmd.mesh.spec import platform_of

Specs = Mapping[str, tuple[Entry, ...]]


class Programs:
    """Functions over weights and a state that they share.

    Attributes:
      functions: by name.
      compile_total: programs compiled so far.
      weights, state: arrays, as the functions take them.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        mesh: spmd.Mesh,
        weights: Any,
        state: Any,
        specs: Specs,
        primary: str,
        options: spmd.Options | None = None,
    ) -> None:
        """Compiles all.

        Args:
          functions: what to compile.
          mesh: of devices that are here.
          weights: a tree of arrays; or a function of a tree of shardings that makes it.
          state: a tree of `StateLeaf`s.
          specs: path -> spec, entries axis names, tuples of them, None, or `"..."`.
          primary: the function whose plan decides what specs leave open.
          options: of the compiler.
        """
        self.functions = {function.name: function for function in functions}
        self._mesh = mesh
        self._options = with_gpu_graphs(options or spmd.Options(), platform_of(mesh))
        self._specs = specs
        main = self._compile(self.functions[primary], None)
        placed = dict(zip(self.functions[primary].roles, main.in_shardings, strict=True))
        self._programs = {primary: main}
        for function in functions:
            if function.name != primary:
                self._programs[function.name] = self._compile(function, placed)
        self.compile_total = len(self._programs)
        weights = weights(placed["weights"]) if callable(weights) else weights
        self.weights = jax.device_put(weights, placed["weights"])
        self.state = jax.tree.map(
            lambda leaf, sharding: jnp.full(leaf.shape, leaf.fill, leaf.dtype, device=sharding),
            state,
            placed["state"],
        )
        self._weight_leaves = jax.tree.leaves(self.weights)

    def run(self, name: str, *inputs: Any) -> Any:
        """The outputs of one function; the state is the new one afterwards."""
        roles = self.functions[name].roles
        given = iter(inputs)
        leaves: list[Any] = []
        for role in roles:
            if role == "weights":
                leaves += self._weight_leaves
            else:
                leaves += jax.tree.leaves(self.state if role == "state" else next(given))
        results = self._programs[name].run(leaves)
        if "state" not in roles:
            return results
        self.state, outputs = results
        return outputs

    def __getitem__(self, name: str) -> spmd.Compiled:
        return self._programs[name]

    def _compile(self, function: Function, placed: Mapping[str, Any] | None) -> spmd.Compiled:
        specs = tuple(
            self._argument(name, role, arg, placed)
            for name, role, arg in zip(
                function.arg_names, function.roles, function.args, strict=True
            )
        )
        donated = tuple(i for i, role in enumerate(function.roles) if role == "state")
        state = dict(zip(function.roles, specs, strict=True)).get("state")
        whole = jax.tree.map(lambda x: (None,) * len(x.shape), _outputs(function))
        return spmd.jit(
            function.fn,
            mesh=self._mesh.refined(),
            in_specs=specs,
            out_specs=whole if state is None else (state, whole),
            donate_argnums=donated,
            options=self._options,
        ).compile(*function.args)

    def _argument(self, name: str, role: str, arg: Any, placed: Mapping[str, Any] | None) -> Any:
        """A tree of specs for one argument."""
        if role == "input":
            return jax.tree.map(lambda x: (None,) * len(x.shape), arg)
        if placed is not None:
            return jax.tree.map(lambda sharding: sharding.spec, placed[role])
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._spec("/".join([name, *(str(e.key) for e in path)]), leaf), arg
        )

    def _spec(self, path: str, leaf: Any) -> Any:
        found = on_mesh(path, leaf.shape, self._specs, self._mesh, [])
        return (...,) * len(leaf.shape) if found is None else found


def _outputs(function: Function) -> Any:
    results = jax.eval_shape(function.fn, *function.args)
    return results[1] if "state" in function.roles else results
