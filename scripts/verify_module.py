"""Partitions a StableHLO file and checks the result against the same file on one device.

Arguments are random. A spec has an entry for each dim, separated by commas: an axis, several as
`data+model`, `-` for a dim that is not split, `...` for one that is up to the compiler.

Exit status: 0 if every result agrees, 1 if one differs, 2 if there is nothing to compare.

Examples:
    scripts/verify model.mlir --mesh data=4,model=2
    scripts/verify model.mlir --mesh data=4,model=2 --arg_spec 0=data,- --arg_spec 1=-,model
    scripts/verify model.mlirbc --mesh data=8 --result_spec 0=data --rtol 1e-3 --high 1000
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import app, flags

from scripts.specs import UsageError, parse_mesh, parse_specs

if TYPE_CHECKING:
    from spmd.ir.types import TensorType

_MESH = flags.DEFINE_string("mesh", "data=4,model=2", "Mesh axes and their sizes.")
_ARG_SPECS = flags.DEFINE_multi_string(
    "arg_spec", [], "NUMBER=SPEC of an argument, as in 0=data,-; open where not given. Repeatable."
)
_RESULT_SPECS = flags.DEFINE_multi_string("result_spec", [], "NUMBER=SPEC of a result. Repeatable.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the random arguments.", lower_bound=0)
_HIGH = flags.DEFINE_integer(
    "high", 8, "Integer arguments are random from 0 up to this one, exclusive.", lower_bound=1
)
_RTOL = flags.DEFINE_float("rtol", None, "Relative tolerance of floats. Default: by dtype.")
_ATOL = flags.DEFINE_float("atol", None, "Absolute tolerance of floats. Default: by dtype.")
_VERBOSE = flags.DEFINE_bool("verbose", False, "Also print every sharding and collective.")


def random_argument(type_: TensorType, rng: np.random.Generator, high: int) -> Any:
    """A random array of a type: floats between -1 and 1, integers from 0, predicates."""
    from spmd.ir.types import numpy_dtype

    dtype = numpy_dtype(type_.dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, type_.shape).astype(np.bool_)
    if type_.dtype.startswith(("i", "ui")):
        return rng.integers(0, high, type_.shape).astype(dtype)
    numbers = rng.uniform(-1, 1, type_.shape)
    if dtype.kind == "c":
        return (numbers + 1j * rng.uniform(-1, 1, type_.shape)).astype(dtype)
    return numbers.astype(dtype)


def verify_file(path: str) -> bool:
    """Compiles, runs and compares; prints the report and says whether all results agree."""
    axes = parse_mesh(_MESH.value)
    _make_cpu_devices(math.prod(axes.values()))
    import spmd
    from spmd.frontend.importer.module import parse_module, signature

    module = parse_module(os.path.abspath(path))
    arguments, results = signature(module)
    compiled = spmd.compile_stablehlo(
        module,
        spmd.make_mesh(devices=None, **axes),
        parse_specs("arg_spec", _ARG_SPECS.value, len(arguments)),
        parse_specs("result_spec", _RESULT_SPECS.value, len(results)),
        spmd.Options(check=True),
    )
    print(compiled.explain() if _VERBOSE.value else compiled.summary())
    rng = np.random.default_rng(_SEED.value)
    given = [random_argument(type_, rng, _HIGH.value) for type_ in arguments]
    found = compiled.verify(*given, rtol=_RTOL.value, atol=_ATOL.value)
    print(found)
    return found.ok


def _make_cpu_devices(count: int) -> None:
    """Jax reads this when it is imported; it has no effect on other platforms than the CPU."""
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={count}".strip()


def main(argv: Sequence[str]) -> None:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    from spmd.errors import SpmdError

    try:
        if len(argv) != 2:
            raise UsageError(f"give one StableHLO file, not {len(argv) - 1}")
        agrees = verify_file(argv[1])
    except (UsageError, SpmdError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if agrees else 1)


if __name__ == "__main__":
    app.run(main)
