"""A torch module inside of a function of jax, and functions of jax inside of a torch module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch
import torch.utils._pytree as torch_tree  # torchax's own, which knows transformers' outputs
from torchax.tensor import Tensor

from spmd.errors import ArgumentError, described
from spmd.torch.held import check_module
from spmd.torch.inputs import take_apart
from spmd.torch.program import key_of
from spmd.torch.state import arrays_of, state_of
from spmd.torch.tracing import as_arrays, check_pure, run


def functional(
    module: Any, fn: Callable[..., Any] | None = None
) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Takes a torch module apart into its weights and a pure function of jax.

    Args:
      module: a `torch.nn.Module` in evaluation mode.
      fn: a function of the module and its inputs, as its methods are; the forward pass if left out.

    Returns:
      (weights, call). The weights are arrays by torch's names, tied ones once under the first name.
      `call(weights, *args, **kwargs)` computes what the module does, with arrays in place of
      tensors. Whatever else is among the arguments, numbers or functions, the module gets as it is.
      `jax.jit`, `spmd.jit` and `jax.export` trace it.

    Raises:
      ArgumentError: it is no torch module. `call` raises what `spmd.torch.export` does.

    Example:
      >>> weights, call = spmd.torch.functional(model.eval())
      >>> logits = jax.jit(call)(weights, tokens)
    """
    check_module(module)

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    def call(weights: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = take_apart(module.forward, args, kwargs)
        ran = run(module, fn or forward, weights, inputs, inputs.arrays(), key_of((0, 0)))
        check_pure(ran)
        return torch_tree.tree_map_only(torch.Tensor, lambda t: as_arrays([t])[0], ran.result)

    return arrays_of(state_of(module).tensors), call


def call_jax(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of jax, as the ops of `spmd.ops` are, while a torch module is traced.

    Args:
      fn: a function of arrays; what it closes over may be arrays of the same trace.
      *args: pytrees of tensors, which it gets as arrays.

    Returns:
      What it returns, with tensors in place of arrays.

    Raises:
      ArgumentError: no argument is a tensor that is traced: the module runs in plain PyTorch.

    Example:
      >>> def forward(self, q, k, v):
      ...     return spmd.torch.call_jax(spmd.ops.attention, q, k, v)
    """
    envs = [t._env for t in torch_tree.tree_leaves(args) if isinstance(t, Tensor)]
    if not envs:
        raise ArgumentError(
            "call_jax is called outside of a trace",
            actual=described(args),
            required="tensors of a module that spmd.torch computes",
            fix="compute it with ops of torch where the module runs in plain PyTorch",
        )
    env = envs[0]
    arrays = torch_tree.tree_map_only(torch.Tensor, lambda t: env.t2j_iso([t])[0], args)
    return jax.tree.map(lambda array: Tensor(array, env), fn(*arrays))
