"""A torch module as a pure jax function or as StableHLO; jax functions inside a torch module."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import torch
import torch.utils._pytree as torch_tree  # torchax's own, which knows transformers' outputs
from torchax.tensor import Tensor

from spmd.errors import ArgumentError, described
from spmd.frontend.artifact import function_artifact
from spmd.torch.arrays import arrays_of, split_result, state_of, take_apart
from spmd.torch.tracing import as_arrays, run_pure, split


def functional(
    module: Any, fn: Callable[..., Any] | None = None
) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Returns a torch module as its weights and a pure jax function of weights and inputs.

    Args:
      module: a `torch.nn.Module` in evaluation mode.
      fn: what is computed, a function (module, *inputs); the forward pass if left out.

    Returns:
      (weights, call). The weights are a dict of arrays by torch's names, tied ones once under the
      first name. `call(weights, *args, **kwargs)` computes what the module does, with arrays in
      place of tensors; other arguments, such as numbers, reach the module as they are. `jax.jit`,
      `spmd.jit` and `jax.export` can trace `call`.

    Raises:
      ArgumentError: `module` is no torch module. `call` raises what `spmd.torch.export` does.

    Example:
      >>> weights, call = spmd.torch.functional(model.eval())
      >>> logits = jax.jit(call)(weights, tokens)
    """
    state = state_of(module)

    def call(weights: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = take_apart(module.forward, args, kwargs)
        result = run_pure(module, fn or operator.call, weights, inputs, inputs.arrays())
        return torch_tree.tree_map_only(torch.Tensor, lambda t: as_arrays([t])[0], result)

    return arrays_of(state.tensors), call


def call_jax(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a jax function, such as an op of `spmd.ops`, inside a torch module that is traced.

    Args:
      fn: a function of arrays. It may close over arrays of the same trace.
      *args: pytrees of tensors, which `fn` gets as arrays.

    Returns:
      What `fn` returns, with tensors in place of arrays.

    Raises:
      ArgumentError: no argument is a traced tensor, as when the module runs in plain PyTorch.

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


class Exported(NamedTuple):
    """A module as StableHLO with its weights, for `spmd.compile_stablehlo` and bundles.

    Attributes:
      module: the bytes of a portable StableHLO artifact. Its arguments have torch's names of
        parameters (of tied ones the first), buffers and inputs.
      weights: name -> array, for each argument that is a parameter or buffer.
      arg_names: the names of all arguments, in their order.
    """

    module: bytes
    weights: dict[str, Any]
    arg_names: tuple[str, ...]

    def arguments(self, **inputs: Any) -> list[Any]:
        """Returns weights and `inputs` in `arg_names`' order; ArgumentError for other inputs."""
        wanted = [n for n in self.arg_names if n not in self.weights]
        if any(n not in inputs for n in wanted) or any(n not in self.arg_names for n in inputs):
            raise ArgumentError(
                "the inputs have other names than the module's",
                actual=", ".join(inputs) or "none",
                required=", ".join(wanted),
            )
        return [self.weights[n] if n in self.weights else inputs[n] for n in self.arg_names]


def export(
    module: Any, example_inputs: Sequence[Any] | Mapping[str, Any] = (), *, platform: str = "cpu"
) -> Exported:
    """Returns a torch module's forward pass as StableHLO, with the weights as named arguments.

    Args:
      module: a `torch.nn.Module` in evaluation mode, or what `torch.export.export` made of one.
      example_inputs: positional inputs, or keyword inputs as a mapping; by default those with
        which `torch.export.export` was called.
      platform: `cpu`, `cuda` or `tpu`, where it will run: some jax functions differ by platform.

    Raises:
      ArgumentError: no torch module, or an input with the name of a parameter.
      FrontendError: a module that cannot be traced, draws random numbers or changes buffers.
      UnsupportedOpError: a torch op that torchax cannot compute.

    Example:
      >>> exported = spmd.torch.export(model.eval(), {"input_ids": tokens, "use_cache": False})
      >>> rules = {"*.q_proj.weight": ("model", None)}
      >>> program = spmd.compile_stablehlo(exported.module, mesh, arg_specs=rules)
      >>> (logits,) = program(*exported.arguments(input_ids=tokens.numpy()))
    """
    is_named = isinstance(example_inputs, Mapping)
    given: Any = ((), example_inputs) if is_named else (example_inputs, {})
    if isinstance(module, torch.export.ExportedProgram):
        if not len(example_inputs):
            given = module.example_inputs
        module = module.module()
    state = state_of(module)
    inputs = take_apart(module.forward, *given)
    weights, structs = arrays_of(state.tensors), inputs.structs()
    if both := sorted(weights.keys() & structs.keys()):
        raise ArgumentError(
            f"an input is called like the module's {both[0]!r}",
            fix="rename the parameter of forward",
        )

    def forward(arguments: Any) -> Any:
        given, leaves = split(arguments, weights)
        result = run_pure(module, operator.call, given, inputs, leaves)
        tensors, _ = split_result(result)
        arrays = as_arrays(tensors)
        if isinstance(result, Mapping):  # as those of transformers
            names = [name for name, value in result.items() if isinstance(value, torch.Tensor)]
            if len(names) == len(arrays):
                return dict(zip(names, arrays, strict=True))
        return arrays[0] if len(arrays) == 1 else tuple(arrays)

    taken = {**weights, **structs}
    names = sorted(taken)
    data, _, _ = function_artifact(forward, (taken,), platform=platform, names=names)
    return Exported(data, weights, tuple(names))
