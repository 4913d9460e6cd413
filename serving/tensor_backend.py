"""A function of a bundle with named arrays in and out, as inference protocols have it."""

import logging
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from spmd.frontend.sizes import symbols_in
from spmd.serving.bundle.batch import why_not_joined
from spmd.serving.bundle.bundle import Bundle
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.manifest import Entrypoint, LeafEntry, Variant
from spmd.serving.engine.infer import Array, TensorSpec

_LOG = logging.getLogger("serving")

CLOSE = 1e-3
"""How far a row may change when others do, by rounding: of its largest number."""


class BundleInfer:
    """One function of a bundle, at one size or at several.

    Args:
      function: its name; the primary one if left out.

    Attributes:
      inputs, outputs: every array; names are paths, and -1 is a dim that has several sizes.
      batch_sizes: how many rows a call may have, where rows of several calls can be one call's:
        the first dim of all inputs and outputs is the same symbol, of several sizes, and rows do
        not depend on each other, which is tried here.
      not_batched: why it has no `batch_sizes` although it has several sizes.

    Raises:
      BundleError: there is no such function.

    Example:
      >>> BundleInfer(bundle).infer({"x": np.ones((4, 8), np.float32)})["result"].shape
      (4, 2)
    """

    def __init__(self, bundle: Bundle, function: str | None = None) -> None:
        self.bundle = bundle
        self.name = function or _origin(bundle.manifest.functions[bundle.manifest.primary]).name
        variants = bundle.manifest.variants(self.name)
        if not variants or variants[0].name not in bundle.functions:
            names = ", ".join(dict.fromkeys(_origin(e).name for e in bundle.functions.values()))
            raise BundleError(f"there is no function {self.name!r}; there are {names}")
        self._functions = {
            tuple(tuple(leaf.shape) for leaf in entry.inputs): entry.name for entry in variants
        }
        last, origin = variants[-1], _origin(variants[-1])
        several = last.sizes if isinstance(last, Variant) else {}
        self.inputs = _specs(last.inputs, origin.inputs, set(several))
        self.outputs = _specs(last.outputs, origin.outputs, set(several))
        self.batch_sizes: tuple[int, ...] = ()
        self.not_batched = self._join(variants)
        if self.not_batched:
            _LOG.info("requests are not joined: %s", self.not_batched)

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
        given = [tensors[name] for name in wanted]
        outputs = self.bundle.run_flat(self._function(given), given)
        arrays = [np.asarray(x) for x in jax.device_get(outputs)]
        return {spec.name: x for spec, x in zip(self.outputs, arrays, strict=True)}

    def _function(self, given: Sequence[Array]) -> str:
        """The function for arrays of these shapes."""
        if len(self._functions) == 1:  # which says what does not fit
            return next(iter(self._functions.values()))
        shapes = tuple(np.shape(x) for x in given)
        if shapes not in self._functions:
            told = ", ".join(
                f"{s.name} {list(x)}" for s, x in zip(self.inputs, shapes, strict=True)
            )
            names = ", ".join(self._functions.values())
            raise BundleError(f"there is no function for {told}; there are {names}")
        return self._functions[shapes]

    def _join(self, variants: Sequence[Entrypoint]) -> str:
        """Finds `batch_sizes`; or returns why there are none, where there are several sizes."""
        families = [entry for entry in variants if isinstance(entry, Variant)]
        if not families:
            return ""
        if len(families[0].sizes) > 1:
            return f"several of its symbols have several sizes: {', '.join(families[0].sizes)}"
        (symbol,) = families[0].sizes
        sizes = tuple(entry.sizes[symbol] for entry in families)
        reason = why_not_joined(families[0].origin, symbol)
        if not reason and not self._rows_stand_alone(sizes[-1]):
            reason = f"rows of a batch change each other's results in {self.name}"
        if not reason:
            self.batch_sizes = sizes
            _LOG.info("requests are joined to batches of %s", ", ".join(map(str, sizes)))
        return reason

    def _rows_stand_alone(self, rows: int) -> bool:
        """Whether the first row and the last one stay as they are when all others change."""
        rng = np.random.default_rng(0)
        one, other = ({s.name: _drawn(rng, s, rows) for s in self.inputs} for _ in range(2))
        results = self.infer(one)
        for row in (0, rows - 1):
            mixed = {name: array.copy() for name, array in other.items()}
            for name, array in mixed.items():
                array[row] = one[name][row]
            changed = self.infer(mixed)
            if not all(_close(results[name][row], changed[name][row]) for name in results):
                return False
        return True


def _origin(entry: Entrypoint) -> Entrypoint:
    return entry.origin if isinstance(entry, Variant) else entry


def _specs(
    leaves: Sequence[LeafEntry], written: Sequence[LeafEntry], several: set[str]
) -> tuple[TensorSpec, ...]:
    specs = []
    for leaf, origin in zip(leaves, written, strict=True):
        dims = zip(leaf.shape, origin.shape, strict=True)
        shape = tuple(-1 if several & set(symbols_in((dim,))) else size for size, dim in dims)
        specs.append(TensorSpec(leaf.path, leaf.dtype, shape))
    return tuple(specs)


def _drawn(rng: np.random.Generator, spec: TensorSpec, rows: int) -> Array:
    """Some numbers for an input; whole ones are 0 and 1, which are valid wherever any are."""
    shape, dtype = (rows, *spec.shape[1:]), np.dtype(spec.dtype)
    if dtype.kind in "biu":
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def _close(one: Array, other: Array) -> bool:
    if one.dtype.kind in "biu":
        return np.array_equal(one, other)
    a, b = one.astype(np.float64), other.astype(np.float64)
    finite = np.abs(a[np.isfinite(a)])
    largest = float(finite.max()) if finite.size else 0.0
    return np.allclose(a, b, rtol=CLOSE, atol=CLOSE * largest, equal_nan=True)
