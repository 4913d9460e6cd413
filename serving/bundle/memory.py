"""Functions over weights and a state, compiled for a mesh in this process, with no folder."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from spmd.frontend.trace import trace
from spmd.lowering.emit import Emitted
from spmd.mesh.spec import as_mesh, platform_of
from spmd.options import Options
from spmd.serving.bundle.bundle import Bundle
from spmd.serving.bundle.describe import (
    arguments_of,
    check_manifest,
    entrypoint,
    leaves_of,
    plain_specs,
    state_leaves,
    symbols_of,
)
from spmd.serving.bundle.function import Function
from spmd.serving.bundle.manifest import WEIGHTS, Entrypoint, Manifest, Sizes, Variant
from spmd.serving.bundle.programs import (
    FunctionKey,
    Placed,
    compile_functions,
    emitted_of,
    static_module,
    with_all_leaves,
)
from spmd.serving.bundle.symbols import plan_sized, planner, too_much


def compile_bundle(
    functions: Sequence[Function],
    mesh: Any,
    *,
    weights: Any = None,
    make_weights: Callable[[Any], Any] | None = None,
    specs: Mapping[str, Any] | None = None,
    state: Any = None,
    primary: str | None = None,
    options: Options | None = None,
    symbols: Mapping[str, Sizes] | None = None,
    memory_share: float | None = None,
    contract: Mapping[str, Any] | None = None,
    first: Callable[[Manifest], Collection[str]] | None = None,
) -> Bundle:
    """What `load_bundle` makes of the bundle that `write_bundle` would write.

    Args:
      functions, specs, state, primary: as for `write_bundle`.
      mesh: a `spmd.Mesh`, or jax's.
      weights: a pytree of arrays; or of `ShapeDtypeStruct`s, with `make_weights`.
      make_weights: makes the weights of the pytree of their shardings.
      symbols, memory_share, first: as for `load_bundle`.
      contract: as for `write_bundle`.

    Raises:
      BundleError: functions, state and specs that do not fit each other, or that XLA refuses.
      SpmdError: a function that cannot be lowered.
    """
    mesh = as_mesh(mesh)
    platform = platform_of(mesh)
    options = options or Options()
    manifest, traced = described(functions, platform, weights, specs, state, primary, contract)
    wanted = list(manifest.functions)
    soon = wanted if first is None else with_all_leaves(manifest, first(manifest), wanted)

    def lower(entry: Entrypoint, asked: FunctionKey) -> Emitted:
        name = entry.origin.name if isinstance(entry, Variant) else entry.name
        module = static_module(traced(name), entry, asked)
        return emitted_of(module, mesh.refined(), asked, options)

    def put(placed: Placed) -> Mapping[str, jax.Array]:
        shardings = {leaf.path: placed[leaf.path] for leaf in manifest.weights}
        tree = jax.tree.unflatten(jax.tree.structure(weights), list(shardings.values()))
        made = jax.device_put(weights, tree) if make_weights is None else make_weights(tree)
        return dict(zip(shardings, jax.tree.leaves(made), strict=True))

    plan = planner(manifest, mesh, lower)
    planned = plan_sized(manifest, symbols, mesh, options, memory_share, plan, soon)
    sized = planned.manifest
    names = [entry.name for name in wanted for entry in sized.variants(name)]
    parts = compile_functions(sized, mesh, planned.emitted, planned.more, names, options, put)
    notes = [*planned.notes, *too_much(planned, parts.programs, mesh)]
    bundle = Bundle(sized, mesh, parts, notes, planned.symbols)
    bundle.compile_behind(parts.later, lambda: None)
    return bundle


def described(
    functions: Sequence[Function],
    platform: str,
    weights: Any = None,
    specs: Mapping[str, Any] | None = None,
    state: Any = None,
    primary: str | None = None,
    contract: Mapping[str, Any] | None = None,
) -> tuple[Manifest, Callable[[str], Any]]:
    """What a manifest says of functions, and what lowers one to its module, by name.

    Args:
      platform: that they are lowered for.
      weights, specs, state, primary, contract: as for `compile_bundle`.

    Raises:
      BundleError: what does not fit.
    """
    by_name = {function.name: function for function in functions}

    def entry(function: Function) -> Entrypoint:
        arguments_of(function)  # before it is traced
        return entrypoint(function, jax.eval_shape(function.fn, *function.args), {}, [])

    @functools.cache
    def traced(name: str) -> Any:
        function = by_name[name]
        return trace(function.fn, function.args, {}, platform=platform).module

    manifest = Manifest(
        name="memory",
        producer={},
        primary=primary or functions[0].name,
        functions={name: entry(function) for name, function in by_name.items()},
        weights=leaves_of(weights, WEIGHTS),
        state=state_leaves(state),
        specs=plain_specs(specs or {}),
        contract=dict(contract or {}),
        symbols=symbols_of(functions),
    )
    check_manifest(manifest)
    return manifest, traced
