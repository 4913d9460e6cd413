"""`shard`: a torch module that is called as before, and computes on a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import call
from typing import Any

import torch

from spmd.api import jit
from spmd.options import Options
from spmd.torch.arrays import tensor_of
from spmd.torch.held import Held, Program
from spmd.torch.inputs import Inputs, split_result, take_apart
from spmd.torch.state import Rules, specs_of
from spmd.torch.tracing import NO_RANDOM, RANDOM, Random, as_arrays, key_of, run, split, trace


def shard(
    module: Any,
    mesh: Any,
    rules: Rules | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    seed: int = 0,
    options: Options | None = None,
) -> Sharded:
    """Compiles a torch module's forward pass for a mesh.

    Args:
      module: a `torch.nn.Module`. It is traced as it is, in training or evaluation mode, and left
        unchanged; its tensors are copied onto the mesh.
      mesh: the mesh.
      rules: torch's names of parameters, buffers and inputs, or patterns of them (`*` also crosses
        dots), or numbers of positional inputs -> specs as for `mark_sharding`. The first that
        matches counts. What none matches is up to the compiler.
      example_inputs: positional inputs, or keyword inputs as a mapping; with them it is compiled at
        once, else at the first call.
      seed: of random numbers, which differ from call to call.
      options: compile options.

    Returns:
      An object to call like the module; see `Sharded`.

    Raises:
      SpecError: a rule that matches nothing, or a spec that does not fit.
      UnsupportedOpError: a torch op that torchax cannot compute.
      FrontendError: Python that depends on a tensor's values.
      ArgumentError: something that is no module, or float64 where jax has none.

    Example:
      >>> rules = {"*.q_proj.weight": ("model", None), "input_ids": ("data", None)}
      >>> sharded = spmd.torch.shard(model.eval(), mesh, rules)
      >>> logits = sharded(input_ids=tokens, use_cache=False).logits
    """
    sharded = Sharded(module, mesh, rules or {}, seed, options)
    if isinstance(example_inputs, Mapping):
        sharded.compile(**example_inputs)
    elif len(example_inputs):
        sharded.compile(*example_inputs)
    return sharded


class Sharded(Held):
    """A module on a mesh: call it with tensors, and it gives tensors.

    It is compiled once for each structure, shape and dtype of inputs, and for each mode of the
    module (`module.train()`, `module.eval()`). Inputs that are no tensors are constants of the
    program. Buffers that a call changes are updated.

    Attributes:
      module: as it was given. Its own tensors stay as they are.
      calls: how many calls there were; random numbers depend on it and on `seed`.
    """

    def __init__(
        self, module: Any, mesh: Any, rules: Rules, seed: int = 0, options: Options | None = None
    ) -> None:
        super().__init__(module, mesh, rules, options)
        self.calls = 0
        self._seed = seed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the module's result."""
        inputs = take_apart(self._signature, args, kwargs)
        program = self._program(inputs)
        random = Random(self._seed, self.calls).arguments() if program.draws else ()
        state = split(self._arrays.placed, program.changed)
        leaves, changed = program.compiled(*state, inputs.arrays(), random)
        self._arrays.placed.update(changed)
        self.calls += 1
        device = next((t.device for t in inputs.leaves if isinstance(t, torch.Tensor)), None)
        return program.outputs.rebuild([tensor_of(leaf, device=device) for leaf in leaves])

    def _compile(self, inputs: Inputs) -> Program:
        specs = specs_of(self._rules, self._arrays.state, inputs.inputs, not self._programs)
        noted: list[Any] = []

        def forward(state: Any, leaves: Any, random: Any) -> Any:
            ran = run(self.module, call, state, inputs, leaves, key_of(random))
            tensors, outputs = split_result(ran.result)
            noted[:] = [outputs, ran.draws]
            return as_arrays(tensors), ran.changed

        traced = trace(forward, self._arrays.structs(), inputs.structs(), RANDOM)
        outputs, draws = noted
        changed = tuple(traced.results[1])

        def program(buffers: Any, state: Any, inputs: Any, random: Any) -> Any:
            return traced.call(buffers | state, inputs, random or NO_RANDOM)

        program.__name__ = type(self.module).__name__
        jitted = jit(
            program,
            mesh=self._mesh,
            in_specs=(*split(specs.tensors, changed), specs.inputs, None),
            donate_argnums=(0,),
            options=self._options,
        )
        compiled = jitted.compile(
            *split(self._arrays.known(), changed), inputs.structs(), RANDOM if draws else ()
        )
        for shardings in compiled.in_shardings[:2]:
            self._arrays.place(shardings)
        return Program(compiled, changed, draws, outputs)
