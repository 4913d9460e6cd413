"""Parameters of a Llama with stacked layers -> those with layers apart, and back."""

import jax
import jax.numpy as jnp

from spmd.models.llama.parameters import Params, on_stacks


def stack_layers(params: Params) -> Params:
    """Parameters of an unrolled model -> those of a scanned one."""

    def stacked(layers: Params) -> Params:
        ordered = [layers[str(index)] for index in range(len(layers))]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *ordered)

    return on_stacks(stacked, params)


def unstack_layers(params: Params) -> Params:
    """Parameters with a leading dim L -> parameters with a dict for each layer."""

    def unstacked(layers: Params) -> Params:
        count = jax.tree.leaves(layers)[0].shape[0]
        return {str(at): jax.tree.map(lambda leaf, i=at: leaf[i], layers) for at in range(count)}

    return on_stacks(unstacked, params)
