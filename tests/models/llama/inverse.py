"""What undoes `parameters.unstack_layers` of `spmd.models.llama`."""

import jax
import jax.numpy as jnp

from spmd.models.llama.parameters import Params, on_stacks


def stack_layers(params: Params) -> Params:
    """Parameters of an unrolled model -> those of a scanned one."""

    def stacked(layers: Params) -> Params:
        ordered = [layers[str(index)] for index in range(len(layers))]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *ordered)

    return on_stacks(stacked, params)
