"""A function of a bundle with named arrays in and out, as inference protocols have it."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from serving.bundle.bundle import Bundle
from serving.bundle.function import BundleError
from serving.bundle.manifest import Leaf
from serving.engine.infer import Array, TensorSpec
from spmd.mesh.spec import jax_mesh


class BundleInfer:
    """One function of a bundle.

    Args:
      bundle: loaded.
      function: its name; the primary one if left out.

    Attributes:
      name: of the function.
      inputs, outputs: every array; names are paths.

    Raises:
      BundleError: there is no such function.

    Example:
      >>> BundleInfer(bundle).infer({"x": np.ones((4, 8), np.float32)})["result"].shape
      (4, 2)
    """

    def __init__(self, bundle: Bundle, function: str | None = None) -> None:
        self.bundle = bundle
        self.name = function or bundle.manifest.primary
        if self.name not in bundle.functions:
            names = ", ".join(bundle.functions)
            raise BundleError(f"there is no function {self.name!r}; there are {names}")
        entry = bundle.functions[self.name]
        self.inputs = tuple(map(_spec, entry.inputs))
        self.outputs = tuple(map(_spec, entry.outputs))

    @property
    def platform(self) -> str:
        """What it runs on, such as `cpu` or `gpu`."""
        return str(jax_mesh(self.bundle.mesh).devices.flat[0].platform)

    def infer(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Run the function.

        Args:
          tensors: name -> array, one for each of `inputs`.

        Returns:
          Name -> array, one for each of `outputs`.

        Raises:
          BundleError: an input that is missing, unknown, or of another shape or dtype.
        """
        wanted = [spec.name for spec in self.inputs]
        for problem, names in (
            ("no input", [name for name in wanted if name not in tensors]),
            ("the unknown input", [name for name in tensors if name not in wanted]),
        ):
            if names:
                expected = ", ".join(wanted) or "none"
                raise BundleError(f"{self.name} got {problem} {names[0]!r}; inputs are {expected}")
        outputs = self.bundle.run_flat(self.name, [tensors[name] for name in wanted])
        arrays = [np.asarray(x) for x in jax.device_get(outputs)]
        return {spec.name: x for spec, x in zip(self.outputs, arrays, strict=True)}


def _spec(leaf: Leaf) -> TensorSpec:
    return TensorSpec(leaf.path, leaf.dtype, leaf.shape)
