"""All programs of other people's packages, and how their numbers are compared."""

import importlib
import warnings
from typing import NamedTuple

import jax

import spmd
from benchmarks.corpus.compare import assert_same_trees
from benchmarks.corpus.packages.program import Make, abstract, concrete, marked
from benchmarks.programs.program import Built, Program

AXES = {"data": 4, "model": 2}

MODULES = (
    "linen", "nnx", "equinox", "haiku", "penzai", "quantization", "solvers", "probability",
    "graphs", "control", "keras",
)  # fmt: skip
"""The modules beside this one; each says of what packages it is."""

NOISY = {"quantization.qwix_training": 5e-2}
"""Tolerances of programs in which rounding grows, whatever the precision: qwix's scales put the
largest number of a channel at 127.5, which rounds either way."""


class Entry(NamedTuple):
    """A program and where it comes from: `name` is module.function."""

    name: str
    make: Make

    def compare_numbers(self) -> None:
        """Runs the small program partitioned and not.

        Raises:
          AssertionError: the numbers differ.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's
            made = concrete(self.make)
            mesh = spmd.make_mesh(**AXES)
            want = jax.jit(made.fn)(*made.args)
            partitioned = spmd.jit(made.fn, mesh=mesh, options=spmd.Options(check=True))
            got = partitioned(*marked(made, mesh))
            assert_same_trees(got, want, NOISY.get(self.name))

    def program(self) -> Program:
        """The large program, without numbers, for a benchmark."""

        def build(mesh: spmd.Mesh) -> Built:
            made = abstract(self.make)
            return Built(made.fn, marked(made, mesh))

        return Program(self.name, AXES, build)


def entries(module: str) -> list[Entry]:
    """The programs of a module.

    Raises:
      ImportError: a package is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = importlib.import_module(f"benchmarks.corpus.packages.{module}")
    return [Entry(f"{module}.{make.__name__}", make) for make in found.PROGRAMS]
