"""Parses meshes, sizes of symbols and specs from the text of flags."""

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from typing import Any

import jax

from spmd.api import static_module
from spmd.errors import ArgumentError
from spmd.frontend.importer.module import boundary_names


def add_module_flags(parser: ArgumentParser) -> None:
    """Adds the argument `module` and the flags `mesh`, `symbols`, `arg_spec` and `result_spec`."""
    add = parser.add_argument
    add("module", help="the StableHLO file")
    add("--mesh", type=mesh_axes, default="data=4,model=2", help="axes and their sizes")
    add("--symbols", type=symbol_values, help="sizes of the module's symbolic dims, as in n=128")
    spec: dict[str, Any] = {"action": "append", "default": [], "metavar": "WHICH=SPEC"}
    add(
        "--arg_spec",
        help="spec of an argument, by its number from 0, its name, or a pattern of names; "
        "arguments without one are open (repeatable)",
        **spec,
    )
    add("--result_spec", help="the same for a result (repeatable)", **spec)


def read_module(given: Namespace) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Returns (module, arguments' specs by name, results' specs by name) of parsed flags."""
    module = static_module(given.module, given.symbols)
    arguments, results = boundary_names(module)
    return (
        module,
        parse_named_specs("arg_spec", given.arg_spec, arguments),
        parse_named_specs("result_spec", given.result_spec, results),
    )


def default_to_cpus(count: int | None = None) -> None:
    """Makes jax use CPUs, `count` if given, unless JAX_PLATFORMS or XLA_FLAGS say otherwise."""
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    if count and "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)


def mesh_axes(text: str) -> dict[str, int]:
    """Parses "data=4,model=2" as {"data": 4, "model": 2}; ArgumentTypeError for other forms."""
    return _named_sizes(text, "axis", "data=4,model=2")


def symbol_values(text: str) -> dict[str, int]:
    """Parses "n=128,batch=8" as {"n": 128, "batch": 8}; ArgumentTypeError for other forms."""
    return _named_sizes(text, "symbol", "n=128,batch=8")


def _named_sizes(text: str, what: str, example: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = (part.strip() for part in item.partition("="))
        if not name or not size.isdecimal() or int(size) < 1:
            raise ArgumentTypeError(f"{item!r} is not of the form {what}=size, as in {example}")
        if name in sizes:
            raise ArgumentTypeError(f"{what} {name!r} is given twice")
        sizes[name] = int(size)
    return sizes


def parse_named_specs(flag: str, texts: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """Parses `0=data,None` or `w=data,None` into specs by name; ArgumentError for other forms.

    With `names` ["x"], `["0=data,None"]` is {"x": (("data",), None)}. ArgumentError also for
    a number too large or two specs of one name; a name need not be in `names`. Errors name `flag`.
    """
    specs: dict[str, Any] = {}
    for text in texts:
        name, equals, spec = text.rpartition("=")
        if not equals or not name.strip():
            raise ArgumentError(
                f"--{flag}: {text!r} is not of the form NUMBER=SPEC or NAME=SPEC, as in 0=data,None"
            )
        name = name.strip()
        if name.isdecimal():
            if int(name) >= len(names):
                raise ArgumentError(f"--{flag}: there is no {name} among {len(names)}, from 0")
            name = names[int(name)]
        # `data+model,None,...` is (("data", "model"), None, ...).
        known = {"-": None, "None": None, "...": ...}
        spec = spec.strip().removesuffix(",")
        entries = [entry.strip() for entry in spec.split(",")] if spec else []
        if "" in entries:
            raise ArgumentError(
                f"--{flag}: {text!r} leaves a dim out: write None for one not split"
            )
        if name in specs:
            raise ArgumentError(f"--{flag}: {name!r} has two specs")
        specs[name] = tuple(known.get(entry, tuple(entry.split("+"))) for entry in entries)
    return specs
