"""What torch ops mean while a module is traced: torchax's table, and what it leaves out.

torchax computes each op with jax. Four things it gets differently from PyTorch are put right here:
`torch.no_grad` and `detach` stop gradients, BatchNorm updates its running statistics, random
numbers come from a key that is an argument, and tensors made without a device, or held in a plain
attribute, mix with those that are traced.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.utils._pytree as torch_tree  # torchax's own, which knows transformers' outputs
from torchax.tensor import Environment, Tensor
from torchax.view import View

from spmd.errors import FrontendError
from spmd.torch.arrays import array_of


class Tracing(Environment):  # type: ignore[misc]  # torchax has no types
    """One trace of a module, to be entered: torch ops are jax ops; whether it `draws` randomly."""

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.draws = False
        self._key = key
        for op in (torch.ops.aten.native_batch_norm, torch.ops.aten._native_batch_norm_legit):
            self.override_op_definition(op.default, _batch_norm)
        self.override_op_definition(torch.nn.functional.batch_norm, _functional_batch_norm)
        for op in (torch.ops.aten.detach.default, torch.Tensor.detach, torch.detach):
            self.override_op_definition(
                op, lambda tensor: Tensor(jax.lax.stop_gradient(tensor.jax()), tensor._env)
            )

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Computes an op; under `torch.no_grad` no gradient flows through its result."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise FrontendError(
                "torch.autocast chooses no dtypes here",
                fix="convert what is to be narrower, as in module.to(torch.bfloat16)",
            )
        if torch.is_grad_enabled():
            return super().dispatch(func, types, args, kwargs)
        given = {id(t): t._elem for t in torch_tree.tree_leaves((args, kwargs)) if _is_own(t)}
        result = super().dispatch(func, types, args, kwargs)
        for tensor in filter(_is_own, torch_tree.tree_leaves(result)):
            if given.get(id(tensor)) is not tensor._elem:  # `w.to(dtype)` may be `w` itself
                tensor._elem = jax.lax.stop_gradient(tensor._elem)
        return result

    def t2j_iso(self, torchtensors: Any) -> Any:
        """Traced tensors as jax values; others become constants of the program."""

        def known(x: Any) -> Any:
            return x if isinstance(x, Tensor | View) else self._constant(x)

        return super().t2j_iso(torch_tree.tree_map_only(torch.Tensor, known, torchtensors))

    def get_and_rotate_prng_key(self, generator: Any = None) -> Any:
        """The next key, whatever generator a module names."""
        self.draws = True
        self._key, key = jax.random.split(self._key)
        return key

    def _should_use_torchax_tensor(self, device: Any) -> bool:
        """Also for tensors that are made on no device in particular, or on torch's default."""
        return device is None or bool(super()._should_use_torchax_tensor(device))

    def _constant(self, tensor: Any) -> Any:
        if tensor.requires_grad:
            raise FrontendError(
                f"the module uses a parameter of shape {tuple(tensor.shape)} that is not its own",
                required="every parameter in module.named_parameters()",
                fix="assign it to an attribute of the module as a torch.nn.Parameter",
            )
        return Tensor(jnp.asarray(array_of(tensor, "a tensor that the module holds")), self)


def _is_own(x: Any) -> bool:
    return isinstance(x, Tensor)


def _functional_batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    stats = running_mean, running_var
    return _batch_norm(input, weight, bias, *stats, training, momentum, eps)[0]


def _batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, Any, Any]:
    """`aten.native_batch_norm`: normalizes over all dims but the second, and updates statistics."""
    x = input.jax()
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    dims = (0, *range(2, x.ndim))
    if training:
        mean, var = jnp.mean(wide, dims), jnp.var(wide, dims)
        count = x.size // x.shape[1]
        # Normalizing divides by `count`, the running variance by `count - 1`.
        _move(running_mean, mean, momentum)
        _move(running_var, var * (count / max(count - 1, 1)), momentum)
    else:
        mean, var = running_mean.jax(), running_var.jax()

    def along(values: Any) -> Any:
        return jnp.reshape(values, (1, -1) + (1,) * (x.ndim - 2))

    scale = jax.lax.rsqrt(var + eps)
    y = (wide - along(mean)) * along(scale)
    if weight is not None:
        y = y * along(weight.jax())
    if bias is not None:
        y = y + along(bias.jax())
    return input._env.j2t_iso((y.astype(x.dtype), mean, scale))  # type: ignore[no-any-return]


def _move(running: Any, new: Any, momentum: float) -> None:
    """Moves a running statistic towards a new one, in place as PyTorch does."""
    if running is None:
        return
    old = running._elem
    moved = (1 - momentum) * old + momentum * jax.lax.stop_gradient(new)
    running._elem = moved.astype(old.dtype)
