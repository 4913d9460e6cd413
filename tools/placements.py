"""Whether marks make plans faster: random programs, each planned free and with random marks.

A program has at most ten ops over two axes; its results are open, and half of its arguments. It is
planned without further marks, and with all specs of its results and of what is between, or with
--draws random ones. No plan with marks should be predicted to be faster than the one without:
those that are by more than 1% are printed with the program and the marks, in the order of seeds.
Each program has a process of its own, and is the same whenever its seed and --draws are: a run that
was ended goes on with --first.

Example:
    tools/run placements --programs 300 --draws 200 --processes 32
    tools/run placements --first 120 --programs 180 --draws 200
"""

import itertools
import math
import multiprocessing
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import spmd
from spmd.cli.flags import Parser, positive
from spmd.compiler import compile_module

MESH = spmd.Mesh(None, (4, 2), ("data", "model"))
H200 = spmd.Topology("h200:8")
QUIET = spmd.Options(progress=False)

SIZES = (1024, 2048, 8192)
LARGEST, MOST_ARITHMETIC = 2**31, 2**28
"""Elements of an argument, and of a product."""

KINDS = ("dot", "dot", "dot", "add", "add", "sum", "transpose", "softmax", "tanh")

Spec = tuple[Any, ...]
Marks = Mapping[int, Spec]
"""Number of a value -> its spec."""


def specs_of(rank: int, mesh: spmd.Mesh = MESH) -> list[Spec]:
    """Every way to lay whole axes on the dims of a value."""
    found = []
    for places in itertools.product(range(-1, rank), repeat=len(mesh.axis_names)):
        dims = [
            tuple(n for n, p in zip(mesh.axis_names, places, strict=True) if p == d)
            for d in range(rank)
        ]
        found.append(tuple(names or None for names in dims))
    return found


class Step(NamedTuple):
    """One op of a random program: its name, the values that it reads, and a dim or two."""

    name: str
    reads: tuple[int, ...]
    dims: tuple[int, ...] = ()


class Drawn(NamedTuple):
    """A random program. Its values are numbered: arguments, then what each op makes."""

    specs: tuple[Spec | None, ...]  # of each argument; None: it is open
    steps: tuple[Step, ...]  # the ops
    shapes: tuple[tuple[int, ...], ...]  # of every value
    results: tuple[int, ...]  # the values that nothing reads

    @property
    def inner(self) -> list[int]:
        """The values between arguments and results."""
        return [i for i in range(len(self.specs), len(self.shapes)) if i not in self.results]

    def run(self, marks: Marks, args: Sequence[Any]) -> list[Any]:
        """The results; values in between are marked."""
        values = list(args)
        for number, step in enumerate(self.steps, len(args)):
            made = _made(step, [values[i] for i in step.reads])
            if number in marks:
                made = spmd.mark_sharding(made, MESH, marks[number])
            values.append(made)
        return [values[i] for i in self.results]

    def seconds(self, marks: Marks) -> float:
        """What its plan with some marks is predicted to take."""
        inner = {i: spec for i, spec in marks.items() if i not in self.results}
        args = [
            made if spec is None else spmd.mark_sharding(made, MESH, spec)
            for spec, shape in zip(self.specs, self.shapes, strict=False)
            for made in [jax.ShapeDtypeStruct(shape, jnp.float32)]
        ]
        ends = [marks.get(i) for i in self.results]
        jitted = spmd.jit(lambda *args: self.run(inner, args), mesh=MESH, out_specs=ends)
        return compile_module(jitted.request(*args, topology=H200), QUIET).timeline.seconds

    def text(self, marks: Marks) -> str:
        """A line for each value, with its mark, and the results."""
        marks = {i: spec for i, spec in enumerate(self.specs) if spec is not None} | dict(marks)
        names = ["argument"] * len(self.specs)
        for name, reads, dims in self.steps:
            names.append(f"{name} {', '.join(f'%{i}' for i in reads)} {dims or ''}".rstrip())
        lines = [
            f"%{i} = {name}: {'x'.join(map(str, shape))} {marks.get(i, '')}".rstrip()
            for i, (name, shape) in enumerate(zip(names, self.shapes, strict=True))
        ]
        return "\n".join([*lines, f"return {', '.join(f'%{i}' for i in self.results)}"])


def _made(step: Step, reads: Sequence[Any]) -> Any:
    a, d = reads[0], step.dims
    if step.name == "dot":
        return jnp.tensordot(a, reads[1], ((d[0],), (d[1],)))
    if step.name == "add":
        return a + reads[1]
    if step.name == "sum":
        return a.sum(d[0])
    if step.name == "transpose":
        return a.transpose(d)
    return jax.nn.softmax(a, d[0]) if step.name == "softmax" else jnp.tanh(a)


def drawn(draw: random.Random) -> Drawn:
    """A program of at most ten ops."""
    arguments = draw.randint(1, 3)
    shapes = [
        tuple(draw.choice(SIZES) for _ in range(draw.choice((2, 2, 3)))) for _ in range(arguments)
    ]
    shapes = [shape if math.prod(shape) <= LARGEST else shape[:2] for shape in shapes]
    steps: list[Step] = []
    for _ in range(draw.randint(2, 10)):
        step, shape = _step(draw, shapes)
        steps.append(step)
        shapes.append(shape)
    read = {i for step in steps for i in step.reads}
    results = tuple(i for i in range(arguments, len(shapes)) if i not in read)
    specs = tuple(
        draw.choice(specs_of(len(shape))) if draw.random() < 0.5 else None
        for shape in shapes[:arguments]
    )
    return Drawn(specs, tuple(steps), tuple(shapes), results)


def _step(draw: random.Random, shapes: Sequence[tuple[int, ...]]) -> tuple[Step, tuple[int, ...]]:
    """One op on values of these shapes, and the shape of what it makes."""
    i = draw.randrange(len(shapes))
    a = shapes[i]
    dots = [
        (j, d, e)
        for j, b in enumerate(shapes)
        for d, e in itertools.product(range(len(a)), range(len(b)))
        if a[d] == b[e] and math.prod(a) * math.prod(b) / a[d] ** 2 <= MOST_ARITHMETIC
    ]
    alike = [j for j, b in enumerate(shapes) if b == a and j != i]
    name = draw.choice(KINDS)
    if name == "dot" and dots:
        j, d, e = draw.choice(dots)
        b = shapes[j]
        return Step(name, (i, j), (d, e)), (*a[:d], *a[d + 1 :], *b[:e], *b[e + 1 :])
    if name == "add" and alike:
        return Step(name, (i, draw.choice(alike))), a
    if name == "sum" and a:
        d = draw.randrange(len(a))
        return Step(name, (i,), (d,)), (*a[:d], *a[d + 1 :])
    if name == "transpose":
        order = tuple(draw.sample(range(len(a)), len(a)))
        return Step(name, (i,), order), tuple(a[d] for d in order)
    if name == "softmax" and a:
        return Step(name, (i,), (draw.randrange(len(a)),)), a
    return Step("tanh", (i,)), a


def marks_of(program: Drawn, draws: int, draw: random.Random) -> Iterator[Marks]:
    """All marks of results and of inner values, where they are so few; else so many at random."""
    places = (*program.results, *program.inner)
    ways = [(None, *specs_of(len(program.shapes[i]))) for i in places]
    if math.prod(map(len, ways)) <= draws:
        for chosen in itertools.product(*ways):
            yield {i: spec for i, spec in zip(places, chosen, strict=True) if spec is not None}
        return
    shares = [(i, 0.7) for i in program.results] + [(i, 0.3) for i in program.inner]
    for _ in range(draws):
        yield {
            i: draw.choice(specs_of(len(program.shapes[i])))
            for i, share in shares
            if draw.random() < share
        }


class Explored(NamedTuple):
    """A program's free plan beside those with marks."""

    program: Drawn
    draws: int  # how many marks were tried
    # free, fastest: predicted seconds of the free plan, and of the fastest of all
    free: float
    fastest: float
    marks: Marks  # those of the fastest

    @property
    def ratio(self) -> float:
        """Time of the free plan, over that of the fastest."""
        return self.free / self.fastest

    @property
    def is_beaten(self) -> bool:
        """Whether some marks are faster than none, by more than 1%."""
        return self.ratio > 1.01


def explored(seed: int, draws: int) -> Explored:
    """A random program with random marks; the same for the same seed and number of draws."""
    draw = random.Random(seed)
    program = drawn(draw)
    every = list(marks_of(program, draws, draw))
    free = program.seconds({})
    fastest, _, marks = min(
        [(free, -1, {}), *((program.seconds(m), n, m) for n, m in enumerate(every))],
        key=lambda found: found[:2],
    )
    return Explored(program, len(every), free, fastest, marks)


def in_own_process(seed: int, draws: int) -> Explored | str:
    """Tries one program in a process that ends with it; whatever goes wrong is the outcome."""
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            return process.submit(explored, seed, draws).result()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def report(found: Explored | str) -> str:
    """What is said of a program whose plan was beaten, or that failed."""
    if isinstance(found, str):
        return found
    times = f"{found.free * 1e6:.1f} us, {found.fastest * 1e6:.1f} us with these marks"
    text = found.program.text(found.marks).replace("\n", "\n    ")
    return f"{found.ratio:.3f} ({times})\n    {text}"


def summary(every: Sequence[Explored | str]) -> str:
    """How many programs and draws there were, and how many plans were beaten."""
    found = [one for one in every if isinstance(one, Explored)]
    draws, beaten = sum(one.draws for one in found), sum(one.is_beaten for one in found)
    worst = max((one.ratio for one in found), default=1.0)
    what = f"{len(found)} programs, {draws} draws, {len(every) - len(found)} failed"
    return f"{what}: {beaten} beaten by more than 1%, worst {worst:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the plans that were beaten, and a summary; returns the exit status."""
    parser = Parser("tools/run placements", __doc__)
    add = parser.add_argument
    add("--programs", type=positive, default=30, help="how many programs")
    add("--draws", type=positive, default=30, help="random marks of each, at most")
    add("--first", type=int, default=0, help="seed of the first program; the next follow it")
    add("--processes", type=positive, default=os.cpu_count() or 1, help="processes at a time")
    given = parser.parse_args(arguments)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # the processes take all cores
        os.environ.setdefault(name, "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    seeds = range(given.first, given.first + given.programs)
    every: list[Explored | str] = []
    with ThreadPoolExecutor(given.processes) as pool:
        found = pool.map(in_own_process, seeds, itertools.repeat(given.draws))
        for seed, one in zip(seeds, found, strict=True):
            every.append(one)
            if isinstance(one, str) or one.is_beaten:
                print(f"seed {seed}: {report(one)}", flush=True)
    print(summary(every))
    return int(any(isinstance(one, str) or one.is_beaten for one in every))
