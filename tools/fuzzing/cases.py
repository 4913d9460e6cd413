"""A fuzz case: a JAX program as lines of Python, its arguments, specs and mesh.

The program is text, so that what runs, what is shrunk and what a reproducer file holds are one.
"""

import functools
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FLOATS = ("float32", "bfloat16")
Spec = Any
"""None (open), or a tuple with an entry for each dim."""


class Type(NamedTuple):
    """Shape and dtype name of a value."""

    shape: tuple[int, ...]
    dtype: str


class Arg(NamedTuple):
    """An argument: its name, type and spec."""

    name: str
    type: Type
    spec: Spec = None


class Line(NamedTuple):
    """A statement that defines `target` from `reads`; `type` is None where that is a tuple."""

    target: str
    text: str
    reads: tuple[str, ...]
    type: Type | None


class Case(NamedTuple):
    """Everything that one run needs.

    Attributes:
      mesh: (axis name, size) of each axis.
      args: the arguments.
      lines: the body of the program.
      results: what it returns.
      out_specs: the spec of each result.
      gradient: also return the gradient of a projection of the results to one number.
    """

    mesh: tuple[tuple[str, int], ...]
    args: tuple[Arg, ...]
    lines: tuple[Line, ...]
    results: tuple[str, ...]
    out_specs: tuple[Spec, ...]
    gradient: bool = False


def without_dead_lines(case: Case) -> Case:
    """The case with only the lines and arguments that its results need."""
    needed = set(case.results)
    kept: list[Line] = []
    for line in reversed(case.lines):
        if line.target in needed:
            kept.append(line)
            needed.update(line.reads)
    args = tuple(arg for arg in case.args if arg.name in needed)
    if not args:
        args = case.args[:1]
    return case._replace(args=args, lines=tuple(reversed(kept)))


def infer(text: str, target: str, reads: Sequence[tuple[str, Type]]) -> list[Type] | Type:
    """What a statement defines: a type, or the types of a tuple's elements."""
    names = ", ".join(name for name, _ in reads)
    body = textwrap.indent(text, "    ")
    function = execute(f"def statement({names}):\n{body}\n    return {target}\n")["statement"]
    out = jax.eval_shape(function, *(jax.ShapeDtypeStruct(*type_) for _, type_ in reads))
    if isinstance(out, tuple | list):
        return [Type(tuple(o.shape), str(o.dtype)) for o in out]
    return Type(tuple(out.shape), str(out.dtype))


@functools.lru_cache(maxsize=512)
def _compiled(source: str) -> Any:
    return compile(source, "<fuzz>", "exec")


def execute(source: str) -> dict[str, Any]:
    """Runs source text where the usual names are imported and marks do nothing."""
    scope: dict[str, Any] = {
        "jax": jax, "jnp": jnp, "np": np, "lax": lax, "mark": lambda x, spec: x,
        "__name__": "fuzz",
    }  # fmt: skip
    exec(_compiled(source), scope)
    return scope


# Source text.

_HEADER = '''\
"""{title}"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import spmd

'''

_STEP = '''
def weights(x):
    numbers = np.arange(x.size, dtype=np.float32) % 7 - 3
    return (x.astype(jnp.float32) * numbers.reshape(x.shape)).sum()


def make_step(mark):
    """The program; `mark` is spmd's, or does nothing."""
    program = make_program(mark)
{step}
    return step
'''

_PLAIN_STEP = "    step = program"

_GRADIENT_STEP = """
    def step(*args):
        def loss(*floats):
            given = iter(floats)
            outs = program(
                *(next(given) if jnp.issubdtype(a.dtype, jnp.inexact) else a for a in args)
            )
            floats = (o for o in outs.values() if jnp.issubdtype(o.dtype, jnp.inexact))
            return sum(weights(o) for o in floats)

        floats = [a for a in args if jnp.issubdtype(a.dtype, jnp.inexact)]
        grads = jax.grad(loss, tuple(range(len(floats))))(*floats)
        return program(*args) | {f"gradient{i}": g for i, g in enumerate(grads)}
"""

_MAIN = """

def main():
    mesh = spmd.make_mesh(**MESH)

    def mark(x, spec):
        return spmd.mark_sharding(x, mesh, spec)

    args = arguments()
    print("mesh", MESH, "in_specs", IN_SPECS, "out_specs", OUT_SPECS)
    print(jax.make_jaxpr(make_step(lambda x, spec: x))(*args))
    want = jax.jit(make_step(lambda x, spec: x))(*args)
    step = spmd.jit(
        make_step(mark), mesh=mesh, in_specs=IN_SPECS, out_specs=OUT_SPECS,
        options=spmd.Options(check=True),
    )
    print(step.lower(*args).explain())
    got = step(*args)
    for name in want:
        a, b = (np.asarray(x[name]).astype(np.float64) for x in (got, want))
        print(f"{name}: largest difference", np.abs(a - b).max(initial=0))
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL * np.abs(b).max(initial=1e-3))


if __name__ == "__main__":
    main()
"""


def source(case: Case, title: str = "One fuzz case: run this file.") -> str:
    """The whole case as a Python file that compares `spmd.jit` with `jax.jit` when it is run."""
    return _HEADER.format(title=title) + definitions(case) + _MAIN


def definitions(case: Case) -> str:
    """The part of `source` between its imports and its `main`."""
    floats = sum(arg.type.dtype in FLOATS for arg in case.args) if has_gradient(case) else 0
    out_specs = dict(zip(case.results, case.out_specs, strict=True))
    out_specs |= {f"gradient{i}": None for i in range(floats)}
    names = ", ".join(arg.name for arg in case.args)
    returned = ", ".join(f'"{name}": {name}' for name in case.results)
    body = "\n".join([*(line.text for line in case.lines), f"return {{{returned}}}"])
    program = f"def program({names}):\n{textwrap.indent(body, '    ')}"
    arguments = "".join(f"        {_argument(arg.type)},  # {arg.name}\n" for arg in case.args)
    parts = (
        f"RTOL = {tolerance(case)}\n",
        f"MESH = {dict(case.mesh)!r}\n",
        f"IN_SPECS = {tuple(arg.spec for arg in case.args)!r}\n",
        f"OUT_SPECS = {out_specs!r}\n",
        "\n\ndef arguments():\n    rng = np.random.RandomState(0)\n    return (\n",
        f"{arguments}    )\n",
        f"\n\ndef make_program(mark):\n{textwrap.indent(program, '    ')}\n\n    return program\n",
        _STEP.format(step=_GRADIENT_STEP if has_gradient(case) else _PLAIN_STEP),
    )
    return "".join(parts)


def has_gradient(case: Case) -> bool:
    """Whether there is something to differentiate, and by something."""
    given = {arg.name for arg in case.args if arg.type.dtype in FLOATS}
    made = {line.target for line in case.lines if line.type and line.type.dtype in FLOATS}
    return case.gradient and bool(given) and not (given | made).isdisjoint(case.results)


def tolerance(case: Case) -> float:
    """Relative tolerance: that of the narrowest dtype anywhere in the program."""
    text = "".join(line.text for line in case.lines)
    narrow = "bfloat16" in text or any(arg.type.dtype == "bfloat16" for arg in case.args)
    return 1e-1 if narrow else 1e-4


def _argument(type_: Type) -> str:
    shape, dtype = type_
    if dtype == "bool":
        return f"rng.randint(0, 2, {shape}).astype(bool)"
    if dtype == "int32":
        return f"rng.randint(-4, 12, {shape}).astype(np.int32)"
    return f"jnp.asarray(rng.randint(-96, 97, {shape}) / 64, jnp.{dtype})"
