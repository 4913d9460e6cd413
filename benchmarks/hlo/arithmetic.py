"""The amount of arithmetic of optimized HLO."""

import math
import re
from collections.abc import Mapping

import numpy as np

from benchmarks.hlo.read import arrays, operands
from benchmarks.hlo.runs import Runs
from spmd.measure.hlo import Instruction, parse_module_text


def matmul_flops(text: str) -> int:
    """Floating-point operations of one device in matrix products and convolutions in one run.

    What a convolution's window finds in padding and between dilated elements does not count. The
    TPU compiler writes the products of a windowed einsum as convolutions of two halves, padded.

    Args:
      text: `compiled.as_text("hlo")`.

    Raises:
      ArgumentError: the text has no ENTRY computation.
    """
    module = parse_module_text(text)
    total = 0
    counts = Runs(module, into_wrappers=True).counts()
    for name, computation in module.computations.items():
        types = {instruction.name: instruction.type for instruction in computation}
        total += counts[name] * sum(_flops(instruction, types) for instruction in computation)
    return total


def _flops(instruction: Instruction, types: Mapping[str, str]) -> int:
    """Operations of a dot or a convolution: two for each term of each element; else 0."""
    if instruction.opcode not in ("dot", "convolution"):
        return 0
    left, right = (arrays(types[name])[0][1] for name in operands(instruction)[:2])
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        dims = re.findall(r"\d+", contracted[1]) if contracted else []
        terms = math.prod(left[int(dim)] for dim in dims)
        return 2 * terms * math.prod(arrays(instruction.type)[0][1])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    if labels is None:
        return 0
    result = arrays(instruction.type)[0][1]
    total = 2 * right[labels[2].index("i")]
    total *= result[labels[3].index("b")] * result[labels[3].index("f")]
    window = re.search(r"window=\{([^}]*)\}", instruction.rest)
    given = dict(pair.split("=") for pair in window[1].split()) if window else {}
    for dim in range(len(result) - 2):
        of = {key: text.split("x")[dim] for key, text in given.items()}
        sizes = (
            shape[text.index(str(dim))]
            for shape, text in zip((left, right, result), labels.groups(), strict=True)
        )
        total *= _taps(of, *sizes)
    return total


def _taps(window: Mapping[str, str], data: int, kernel: int, result: int) -> int:
    """Pairs of a place in the result and one in the kernel that meet an element of the data.

    Args:
      window: what HLO says of one dim: `stride`, `pad` (`low_high`), and the dilations.
      data, kernel, result: their sizes in that dim.
    """
    stride, dilated = int(window.get("stride", 1)), int(window.get("lhs_dilate", 1))
    low = int(window.get("pad", "0_0").split("_")[0])
    steps = np.arange(kernel) * int(window.get("rhs_dilate", 1))
    places = np.arange(result)[:, None] * stride + steps - low
    met = (places >= 0) & (places <= (data - 1) * dilated) & (places % dilated == 0)
    return int(met.sum())
