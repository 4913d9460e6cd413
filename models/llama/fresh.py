"""Draws fresh parameters: of a whole model, or of one layer after the other."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from spmd.models.llama.config import LAYERS, LlamaConfig
from spmd.models.llama.parameters import Params, layer_with_states
from spmd.models.training.checkpoints.tables import nested


def init(key: jax.Array, config: LlamaConfig) -> Params:
    """Draws fresh parameters.

    They are normal with standard deviation `initializer_range`. Projections into the residual
    stream are divided by `sqrt(2 * layers)`, so that its variance does not grow with depth. Norms
    are 1, biases 0.

    Returns:
        Nested dicts. With `scan_layers` the leaves under `layers` have a leading dim L. Without it
        `layers` has a dict for each layer, with the keys `"0"`, `"1"`, ... Both have the same
        numbers. Layers without experts, in a model that has some, are `layers` of `dense`.
    """
    outer_key, keys_L = init_keys(key, config)
    params = init_outer(outer_key, config)
    for stack, of_model in config.stacks.items():
        draw = functools.partial(init_layer, config=config, stack=stack)
        if config.scan_layers:
            # One layer after the other: making all at once would need their memory several times.
            layers = jax.lax.map(draw, keys_L[of_model.start : of_model.stop])
        else:
            layers = {str(at): draw(keys_L[index]) for at, index in enumerate(of_model)}
        params |= nested({stack.removesuffix("/"): layers})
    return params


def init_keys(key: jax.Array, config: LlamaConfig) -> tuple[jax.Array, jax.Array]:
    """(the key for `init_outer`, the keys (L,) for `init_layer`) with which `init` calls them."""
    outer_key, layers_key = jax.random.split(key)
    return outer_key, jax.random.split(layers_key, config.num_hidden_layers)


def init_outer(key: jax.Array, config: LlamaConfig) -> Params:
    """Draws fresh parameters of everything but the layers."""
    shapes = config.parameter_shapes()
    outer = {path: shape for path, shape in shapes.items() if config.stack_of(path) is None}
    return _init_leaves(key, outer, config)


def init_layer(key: jax.Array, config: LlamaConfig, stack: str = LAYERS) -> Params:
    """Draws fresh parameters of one layer of a stack."""
    shapes = config.parameter_shapes()
    inner = {p.removeprefix(stack): s for p, s in shapes.items() if p.startswith(stack)}
    return layer_with_states(_init_leaves(key, inner, config), config)


def _init_leaves(
    key: jax.Array, shapes: Mapping[str, tuple[int, ...]], config: LlamaConfig
) -> Params:
    keys = zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True)
    return nested({path: _init_leaf(one, path, shape, config) for (path, shape), one in keys})


def _init_leaf(key: jax.Array, path: str, shape: tuple[int, ...], config: LlamaConfig) -> jax.Array:
    if path.endswith("norm/weight"):
        return jnp.full(shape, 1 - config.norm_offset, config.param_dtype)
    if path.endswith("bias"):
        return jnp.zeros(shape, config.param_dtype)
    into_residual = path.endswith(("o_proj/weight", "down_proj/weight"))
    scale = (2 * config.num_hidden_layers) ** -0.5 if into_residual else 1.0
    return (scale * config.initializer_range * jax.random.normal(key, shape)).astype(
        config.param_dtype
    )
