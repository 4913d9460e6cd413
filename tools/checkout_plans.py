"""Lowers benchmark programs with one checkout's `spmd`, as another process asks for them by name.

`tools/compare_checkouts.py` starts this once for each checkout. Only public names of `spmd` are
used here and in `benchmarks/programs`, so that `spmd` may be of any age.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import spmd
from benchmarks.corpus.program import MESHES, QUICK_MESH, mark
from benchmarks.corpus.program import Program as Written
from benchmarks.corpus.programs import PROGRAMS
from benchmarks.programs.catalog import programs
from benchmarks.programs.conditions import forget, small_machine
from benchmarks.programs.program import Program
from benchmarks.programs.step import Step, lower

TEXTS = ("propagated", "planned", "optimized", "emitted")
"""The stages whose texts are compared."""

STEPS = {
    f"step/{step.model}-{step.layers}-{'scanned' if step.scan else 'unrolled'}": step
    for model, layers in (("tiny", 2), ("llama2-7b", 4), ("llama2-7b", 8))
    for scan in (True, False)
    for step in [Step(layers, scan, model=model)]
}

SPMD = Path(spmd.__file__).parent


def everything() -> dict[str, Callable[[], spmd.Lowered]]:
    """Every program by name, to be lowered when called."""
    return {
        **{program.name: partial(lower_small, program) for program in programs()},
        **{f"corpus/{program.name}": partial(lower_written, program) for program in PROGRAMS},
        **{name: partial(lower, step) for name, step in STEPS.items()},
    }


def lower_written(program: Written) -> spmd.Lowered:
    """A program of the corpus, for the machine and the mesh that its quick test has."""
    mesh = spmd.make_mesh(**MESHES[QUICK_MESH])
    made = program.made(mesh)
    args = [mark(arg, word, mesh) for arg, word in zip(made.args, made.specs, strict=True)]
    return spmd.jit(made.fn, mesh=mesh).lower(*args)


def lower_small(program: Program) -> spmd.Lowered:
    """A program of the catalog, planned for a machine as small."""
    mesh, built = program.make()
    options = spmd.Options(topology=small_machine())
    jitted = spmd.jit(built.fn, mesh=mesh, donate_argnums=built.donate, options=options)
    return jitted.lower(*built.args)


def measure(lowering: Callable[[], spmd.Lowered]) -> dict[str, Any]:
    """The fields of `compare_checkouts.Measured` for a program; an error is a result, too."""
    forget()
    try:
        lowered = lowering()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {
        "texts": {stage: fingerprint(lowered.as_text(stage)) for stage in TEXTS},
        "plan": lowered.stages.plan.seconds,
        "run": lowered.cost,
        "bytes": sum(c.bytes * c.count for c in lowered.collectives),
        "stages": dict(lowered.stages.seconds),
    }


def fingerprint(text: str, package: Path = SPMD) -> str:
    """A hash that does not depend on where `spmd` is, nor on which of its lines an op is from."""
    own = re.escape(str(package)) + r'/[^":]*("?)(:\d+)*'
    return hashlib.sha256(re.sub(own, r"spmd\1", text).encode()).hexdigest()


def main(checkout: str, other: str) -> None:
    """Says which programs there are, then measures each that standard input names.

    Args:
      checkout: where `spmd` has to come from.
      other: where the programs have to come from.
    """
    programs = "spmd.models.llama", "benchmarks.programs.catalog"
    modules = {"spmd": checkout, **dict.fromkeys(programs, other)}
    for name, folder in modules.items():
        found = Path(str(sys.modules[name].__file__)).resolve()
        if not found.is_relative_to(Path(folder).resolve()):
            raise RuntimeError(f"{name} is {found}, not from {folder}")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # what a library prints is no answer
    known = everything()
    print(json.dumps(list(known)), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(known[line.strip()])), file=answers, flush=True)
