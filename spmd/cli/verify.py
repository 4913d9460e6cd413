"""Partitions a StableHLO file and checks the result against the same file on one device.

Arguments are random. A spec has an entry for each dim, separated by commas: an axis, several as
`data+model`, `None` (or `-`) for a dim that is not split, `...` for one that is up to the
compiler. It runs on virtual devices of this machine's CPU, unless JAX_PLATFORMS is set.

Examples:
    spmd verify model.mlir --mesh data=4,model=2
    spmd verify model.mlir --mesh data=4,model=2 --arg_spec 0=data,- --arg_spec 1=-,model
    spmd verify model.mlirbc --mesh data=8 --result_spec 0=data --rtol 1e-3 --high 1000

Exit status: 0 if every result agrees, 1 if one differs, 2 if the file or a flag cannot be used.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import spmd
from spmd.cli.flags import Parser, Switch, positive
from spmd.cli.specs import add_module_flags, default_to_cpus, read_module
from spmd.frontend.importer.module import signature
from spmd.ir.types import TensorType, numpy_dtype


def make_parser() -> Parser:
    """Returns the parser of the flags of `spmd verify`."""
    made = Parser("spmd verify", __doc__)
    add_module_flags(made)
    add = made.add_argument
    add("--seed", type=int, default=0, help="of the random arguments")
    add("--high", type=positive, default=8, help="integers are random from 0 up to it, exclusive")
    add("--rtol", type=float, help="relative tolerance of floats (default: by dtype)")
    add("--atol", type=float, help="absolute tolerance of floats (default: by dtype)")
    add("--verbose", action=Switch, help="also print every sharding and collective")
    return made


def random_argument(type_: TensorType, rng: np.random.Generator, high: int) -> Any:
    """Makes a random array: floats between -1 and 1, integers from 0 to `high` - 1, or booleans."""
    dtype = numpy_dtype(type_.dtype)
    if type_.dtype.startswith(("i", "ui")):
        return rng.integers(0, 2 if dtype == np.bool_ else high, type_.shape).astype(dtype)
    numbers = rng.uniform(-1, 1, type_.shape)
    if dtype.kind == "c":
        return (numbers + 1j * rng.uniform(-1, 1, type_.shape)).astype(dtype)
    return numbers.astype(dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `spmd verify` with these flags (None: `sys.argv`) and returns its exit status."""
    given = make_parser().parse_args(arguments)
    default_to_cpus(math.prod(given.mesh.values()))
    module, arg_specs, result_specs = read_module(given)
    compiled = spmd.compile_stablehlo(
        module,
        spmd.make_mesh(devices=None, **given.mesh),
        arg_specs,
        result_specs,
        spmd.Options(check=True),
    )
    print(compiled.explain() if given.verbose else compiled.summary())
    rng = np.random.default_rng(given.seed)
    arrays = [random_argument(type_, rng, given.high) for type_ in signature(module)[0]]
    found = compiled.verify(*arrays, rtol=given.rtol, atol=given.atol)
    print(found)
    return 0 if found.ok else 1
