"""A function of a bundle with named arrays in and out, as inference protocols have it."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from models.llama.hf_files import Array
from serving.bundle import Bundle
from serving.function import BundleError
from serving.manifest import Leaf
from spmd.mesh.spec import jax_mesh


class Infer:
    """One function of a bundle.

    Args:
      bundle: loaded.
      function: its name; the primary one if left out.

    Attributes:
      name: of the function.
      inputs, outputs: path, shape and dtype of every array.

    Raises:
      BundleError: there is no such function.

    Example:
      >>> Infer(bundle).infer({"x": np.ones((4, 8), np.float32)})["result"].shape
      (4, 2)
    """

    def __init__(self, bundle: Bundle, function: str | None = None) -> None:
        self.bundle = bundle
        self.name = function or bundle.manifest.primary
        if self.name not in bundle.functions:
            names = ", ".join(bundle.functions)
            raise BundleError(f"there is no function {self.name!r}; there are {names}")
        entry = bundle.functions[self.name]
        self.inputs: tuple[Leaf, ...] = entry.inputs
        self.outputs: tuple[Leaf, ...] = entry.outputs

    @property
    def platform(self) -> str:
        """What it runs on, such as `cpu` or `gpu`."""
        return str(jax_mesh(self.bundle.mesh).devices.flat[0].platform)

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the function.

        Args:
          inputs: path -> array, one for each of `inputs`.

        Returns:
          Path -> array, one for each of `outputs`.

        Raises:
          BundleError: an input that is missing, unknown, or of another shape or dtype.
        """
        wanted = [leaf.path for leaf in self.inputs]
        for problem, names in (
            ("no input", [name for name in wanted if name not in inputs]),
            ("the unknown input", [name for name in inputs if name not in wanted]),
        ):
            if names:
                expected = ", ".join(wanted) or "none"
                raise BundleError(f"{self.name} got {problem} {names[0]!r}; inputs are {expected}")
        outputs = self.bundle.run_flat(self.name, [inputs[name] for name in wanted])
        arrays = [np.asarray(x) for x in jax.device_get(outputs)]
        return {leaf.path: x for leaf, x in zip(self.outputs, arrays, strict=True)}
