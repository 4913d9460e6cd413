"""A torch module as StableHLO whose arguments have torch's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from spmd.errors import ArgumentError
from spmd.frontend.artifact import function_artifact
from spmd.torch.held import check_module
from spmd.torch.inputs import split_result, take_apart
from spmd.torch.program import key_of
from spmd.torch.state import arrays_of, state_of
from spmd.torch.tracing import as_arrays, check_pure, run


class Exported(NamedTuple):
    """A module as StableHLO, for `spmd.compile_stablehlo` and bundles.

    Attributes:
      module: a portable artifact. Its arguments are called as torch calls parameters, buffers and
        inputs; of tied tensors the first name counts.
      weights: name -> array of each argument that is a parameter or buffer.
      arg_names: of all arguments, in their order.
    """

    module: bytes
    weights: dict[str, Any]
    arg_names: tuple[str, ...]

    def arguments(self, **inputs: Any) -> list[Any]:
        """All arguments in their order: the weights, and the inputs that are given by name.

        Raises:
          ArgumentError: an input is missing or unknown.
        """
        missing = [n for n in self.arg_names if n not in self.weights and n not in inputs]
        unknown = [n for n in inputs if n not in self.arg_names]
        if missing or unknown:
            raise ArgumentError(
                "the inputs have other names than the module's",
                actual=", ".join(inputs) or "none",
                required=", ".join(n for n in self.arg_names if n not in self.weights),
            )
        return [self.weights[n] if n in self.weights else inputs[n] for n in self.arg_names]


def export(
    module: Any,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    platform: str = "cpu",
) -> Exported:
    """Writes a torch module's forward pass as StableHLO with weights as named arguments.

    Args:
      module: a `torch.nn.Module` in evaluation mode, or what `torch.export.export` made of one.
      example_inputs: positional inputs, or keyword inputs as a mapping; those of the exported
        program if left out.
      platform: `cpu`, `cuda` or `tpu`: some functions of jax are written differently for each.

    Raises:
      FrontendError: a module that draws random numbers or changes buffers, which an exported one
        has no place for, or that cannot be traced.
      UnsupportedOpError: a torch op that torchax cannot compute.

    Example:
      >>> exported = spmd.torch.export(model.eval(), {"input_ids": tokens, "use_cache": False})
      >>> rules = {"*.q_proj.weight": ("model", None)}
      >>> program = spmd.compile_stablehlo(exported.module, mesh, arg_specs=rules)
      >>> (logits,) = program(*exported.arguments(input_ids=tokens.numpy()))
    """
    if isinstance(module, torch.export.ExportedProgram):
        if not len(example_inputs):
            args, kwargs = module.example_inputs
            example_inputs = args or kwargs
        module = module.module()
    check_module(module)
    if isinstance(example_inputs, Mapping):
        inputs = take_apart(module.forward, (), example_inputs)
    else:
        inputs = take_apart(module.forward, example_inputs, {})
    weights, structs = arrays_of(state_of(module).tensors), inputs.structs()
    if both := sorted(weights.keys() & structs.keys()):
        raise ArgumentError(
            f"an input is called like the module's {both[0]!r}",
            fix="rename the parameter of forward",
        )

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    def forward(arguments: Any) -> Any:
        state = {name: arguments[name] for name in weights}
        leaves = {name: arguments[name] for name in structs}
        ran = run(module, call, state, inputs, leaves, key_of((0, 0)))
        check_pure(ran)
        return _named_results(ran.result)

    taken = {**weights, **structs}
    names = sorted(taken)
    data, _, _ = function_artifact(forward, (taken,), platform=platform, names=names)
    return Exported(data, weights, tuple(names))


def _named_results(result: Any) -> Any:
    """The tensors of a result: by name where it is a mapping of them, as transformers' are."""
    tensors, _ = split_result(result)
    arrays = as_arrays(tensors)
    if isinstance(result, Mapping):
        names = [name for name, value in result.items() if isinstance(value, torch.Tensor)]
        if len(names) == len(arrays):
            return dict(zip(names, arrays, strict=True))
    return arrays[0] if len(arrays) == 1 else tuple(arrays)
