"""Random well-typed programs: a hypothesis strategy for `Case`.

A program grows line by line over a pool of values; every op picks operands that fit it and has its
result's type inferred by jax. Each float value carries a bound of its magnitude, so that nothing
overflows; what could be discontinuous is left in, and told from errors by perturbation (`check`).
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tools.fuzzing.cases import FLOATS, Arg, Case, Line, Spec, Type, infer, without_dead_lines

SIZES = (4, 8, 6, 2, 3, 1, 5, 12, 16)
LARGEST = 1024
MOST_ARGS = 5
BOUND = 1e3

MESHES: tuple[tuple[int, ...], ...] = (
    (4, 2), (8,), (2, 2, 2), (2, 4), (2, 3), (2,), (5,), (1, 8), (6,), (3, 2), (2, 1, 3), (7,),
    (4,), (1,), (3,),
)  # fmt: skip
AXES = ("a", "b", "c")


class Settings(NamedTuple):
    """What programs may contain.

    Attributes:
      most_lines: length of the longest program.
      uneven_marks: marks inside the program may name axes that do not divide a dim.
    """

    most_lines: int = 10
    uneven_marks: bool = False


class Var(NamedTuple):
    """A value in the pool; `bound` is the largest magnitude that it may have."""

    name: str
    type: Type
    bound: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype

    @property
    def rank(self) -> int:
        return len(self.type.shape)

    @property
    def size(self) -> int:
        return math.prod(self.type.shape)


def is_float(v: Var) -> bool:
    return v.dtype in FLOATS


def is_number(v: Var) -> bool:
    return v.dtype != "bool"


def anything(v: Var) -> bool:
    return True


class Maker:
    """Grows one block: the program, or the body of a loop inside it."""

    def __init__(self, draw: Any, mesh: Sequence[tuple[str, int]], settings: Settings,
                 gradient: bool, outer: "Maker | None" = None) -> None:  # fmt: skip
        self.draw = draw
        self.mesh = dict(mesh)
        self.settings = settings
        self.gradient = gradient
        self.outer = outer
        self.pool: list[Var] = []
        self.args: list[Arg] = []
        self.lines: list[Line] = []
        self.counter: list[int] = outer.counter if outer else [0]

    # Choices.

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high)) if high > low else low

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def flag(self, one_in: int = 2) -> bool:
        """True one time in so many; shrinks to False."""
        return self.integer(0, one_in - 1) == one_in - 1

    def subset(self, options: Sequence[int]) -> tuple[int, ...]:
        """Some of these, one at least."""
        return tuple(o for o in options if self.flag()) or (options[0],)

    def permutation(self, n: int) -> tuple[int, ...]:
        return tuple(self.draw(st.permutations(range(n))))

    def shape(self, most_rank: int = 3, largest: int = LARGEST) -> tuple[int, ...]:
        shape: tuple[int, ...] = ()
        for _ in range(self.integer(1, most_rank)):
            shape += (self.pick([n for n in SIZES if math.prod(shape) * n <= largest]),)
        return shape

    def spec(self, shape: Sequence[int], uneven: bool = False) -> Spec:
        """A random spec, with axes that divide the shape unless `uneven`."""
        entries: list[Any] = [()] * len(shape)
        for name in self.draw(st.permutations(list(self.mesh))):
            if not shape or self.flag(4):
                continue
            dim = self.integer(0, len(shape) - 1)
            wanted = (*entries[dim], name)
            if uneven or shape[dim] % math.prod(self.mesh[n] for n in wanted) == 0:
                entries[dim] = wanted
        return tuple(
            e if len(e) > 1 else e[0] if e else ... if self.flag(3) else None for e in entries
        )

    def boundary_spec(self, shape: Sequence[int]) -> Spec:
        return None if self.flag(3) else self.spec(shape)

    # Values.

    def name(self, letter: str = "v") -> str:
        self.counter[0] += 1
        return f"{letter}{self.counter[0]}"

    def var(self, fits: Callable[[Var], bool] = anything) -> Var | None:
        """A value from the pool that fits, the newest half of the time."""
        fitting = [v for v in reversed(self.pool) if fits(v)]
        if not fitting or not self.flag():
            return fitting[0] if fitting else None
        return self.pick(fitting)

    def argument(self, shape: tuple[int, ...], dtype: str) -> Var:
        arg = Arg(self.name("x"), Type(shape, dtype), self.boundary_spec(shape))
        self.args.append(arg)
        self.pool.insert(0, Var(arg.name, arg.type, 1.5))
        return self.pool[0]

    def value(self, shape: tuple[int, ...], dtype: str, bound: float = BOUND) -> Var:
        """A value of this type: from the pool, a new argument, or an iota or constant."""
        wanted = Type(shape, dtype)
        have = [v for v in reversed(self.pool) if v.type == wanted and v.bound <= bound]
        kind = self.integer(0, 3)
        if have and kind < 2:
            return self.pick(have)
        if kind < 3 and self.outer is None and len(self.args) < MOST_ARGS:
            return self.argument(shape, dtype)
        return self.made(shape, dtype)

    def made(self, shape: tuple[int, ...], dtype: str) -> Var:
        size = math.prod(shape)
        text = self.pick((
            f"(jnp.arange({size}) % 5 - 1).reshape({shape}).astype('{dtype}')",
            f"jnp.full({shape}, 1, '{dtype}')",
            f"jnp.asarray((np.arange({size}) * 7 % 11 % 5 - 1).reshape({shape}), '{dtype}')",
            f"(lax.broadcasted_iota(jnp.int32, {shape}, {len(shape) - 1}) % 4).astype('{dtype}')"
            if shape
            else f"jnp.asarray(2, '{dtype}')",
        ))  # fmt: skip
        return self.add(text, (), 4.0)

    def add(self, text: str, reads: Sequence[Var], bound: float | None = None) -> Var:
        """A line `v = text`, by default no larger than what it reads together.

        Large values are scaled down on the spot.
        """
        if bound is None:
            bound = max(4.0, sum(v.bound for v in reads if is_float(v)))
        target = self.name()
        var = self.define(f"{target} = {text}", target, [v.name for v in reads], bound)
        if is_float(var) and bound > BOUND:
            power = math.ceil(math.log2(bound / 8))
            return self.add(f"{target} * {2.0**-power!r}", [var], 8.0)
        return var

    def define(self, text: str, target: str, reads: Sequence[str], *bounds: float) -> Var:
        """A statement that defines a value, or a tuple and then a line for each element of it.

        Returns the last value.
        """
        known = {v.name: v.type for v in self.visible()}
        reads = tuple(dict.fromkeys(reads))
        made = infer(text, target, [(name, known[name]) for name in reads])
        types = [made] if isinstance(made, Type) else made
        self.lines.append(Line(target, text, reads, made if isinstance(made, Type) else None))
        for i, (type_, bound) in enumerate(zip(types, bounds, strict=True)):
            name = target
            if made is types:
                name = self.name()
                self.lines.append(Line(name, f"{name} = {target}[{i}]", (target,), type_))
            self.pool.append(Var(name, type_, bound))
        return self.pool[-1]

    def add_tuple(self, text: str, reads: Sequence[Var], *bounds: float) -> None:
        """A line `t = text`, which is a tuple, and one for each element of it."""
        target = self.name("t")
        self.define(f"{target} = {text}", target, [v.name for v in reads], *bounds)

    def visible(self) -> list[Var]:
        return self.pool + (self.outer.visible() if self.outer else [])

    def grow(self, lines: int, ops: "Sequence[Callable[[Maker], None]]") -> None:
        """Adds up to so many ops."""
        for _ in range(lines):
            self.pick(ops)(self)


def on(fits: Callable[[Var], bool] = anything) -> Callable[..., Callable[[Maker], None]]:
    """An op on a value from the pool that fits, where there is one."""

    def of(op: Callable[[Maker, Var], None]) -> Callable[[Maker], None]:
        def run(m: Maker) -> None:
            v = m.var(fits)
            if v is not None:
                op(m, v)

        return run

    return of


# Elementwise.

_NUMBERS = ("{0} < {1}", "{0} >= {1}", "{0} == {1}", "{0} != {1}", "jnp.maximum({0}, {1})")
ELEMENTWISE: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "bool": ("~{0}",),
        "int32": ("{0} + 3", "{0} % 5", "-{0}", "~{0}", "{0} // 3", "lax.population_count({0})"),
        "float": (
            "{0} * 0.5", "-{0}", "jnp.tanh({0})", "jnp.sin({0})", "{0} + 1.0", "jnp.abs({0})",
            "{0} * {0}", "jnp.exp(-jnp.abs({0}))", "jnp.sqrt(jnp.abs({0}) + 0.25)",
            "jax.nn.relu({0})", "jnp.floor({0})", "jnp.sign({0})", "lax.optimization_barrier({0})",
            "lax.stop_gradient({0})",
        ),
    },
    2: {
        "bool": ("{0} & {1}", "{0} | {1}", "{0} ^ {1}"),
        "int32": ("{0} + {1}", "{0} * {1}", "{0} & {1}", "{0} ^ {1}", *_NUMBERS),
        "float": (
            "{0} + {1}", "{0} * {1}", "{0} - {1}", "jnp.minimum({0}, {1})",
            "{0} / (jnp.abs({1}) + 1)", "jnp.where({0} < {1}, {0}, {1} * 2)", *_NUMBERS,
        ),
    },
}  # fmt: skip
"""Number of operands -> their dtype -> what is computed of them."""


def elementwise(m: Maker, *reads: Var) -> None:
    texts = ELEMENTWISE[len(reads)]
    text = m.pick(texts["float" if is_float(reads[0]) else reads[0].dtype])
    product = reads[0].bound * reads[-1].bound if "{0} * {" in text else None
    m.add(text.format(*(v.name for v in reads)), reads, product)


unary = on()(elementwise)


@on()
def binary(m: Maker, v: Var) -> None:
    w = m.value(v.shape, v.dtype)
    elementwise(m, *((w, v) if m.flag() else (v, w)))


@on(is_number)
def select(m: Maker, v: Var) -> None:
    w = m.value(v.shape, v.dtype)
    if m.flag():
        p = scalar(m, "bool")
        m.add(f"lax.select({p.name}, {v.name}, {w.name})", [p, v, w])
    else:
        p = m.value(v.shape, "bool")
        m.add(f"jnp.where({p.name}, {v.name}, {w.name})", [p, v, w])


@on()
def convert(m: Maker, v: Var) -> None:
    dtype = m.pick([d for d in ("bfloat16", "float32", "int32", "bool") if d != v.dtype])
    if dtype == "bool":
        m.add(f"{v.name} > 0", [v])
    elif v.dtype == "int32":
        m.add(f"({v.name} % 7).astype('{dtype}')", [v], 7.0)
    else:
        m.add(f"{v.name}.astype('{dtype}')", [v])


def scalar(m: Maker, dtype: str) -> Var:
    """A value of rank 0, out of some tensor if there is one."""
    v = m.var(lambda v: v.dtype == dtype)
    if v is None:
        v = m.value((), dtype)
    if v.rank == 0:
        return v
    reduced = {"bool": f"{v.name}.any()", "int32": f"{v.name}.max()"}.get(dtype)
    element = f"{v.name}[{', '.join(['0'] * v.rank)}]"
    return m.add(element if reduced is None or m.flag() else reduced, [v])


# Contractions.


@on(lambda v: is_float(v) and v.rank > 0)
def dot(m: Maker, v: Var) -> None:
    roles = [m.integer(0, 2) for _ in range(v.rank)]  # 0: contracted, 1: free, 2: batch
    contract = [d for d, role in enumerate(roles) if role == 0]
    batch = [d for d, role in enumerate(roles) if role == 2]
    kept = math.prod(v.shape[d] for d in batch)
    budget = LARGEST // math.prod(n for d, n in enumerate(v.shape) if d not in contract)
    free = m.shape(2, max(1, budget)) if m.flag() else ()
    inner = [v.shape[d] for d in (*batch, *contract)] + list(free)
    if math.prod(inner) > LARGEST * 4 or kept * math.prod(free) > LARGEST or len(inner) > 5:
        return
    order = m.permutation(len(inner))
    w = m.value(tuple(inner[i] for i in order), v.dtype)
    where = {i: place for place, i in enumerate(order)}
    rhs_batch = tuple(where[i] for i in range(len(batch)))
    rhs_contract = tuple(where[len(batch) + i] for i in range(len(contract)))
    dims = ((tuple(contract), rhs_contract), (tuple(batch), rhs_batch))
    lhs, rhs = v, w
    if m.flag():
        lhs, rhs, dims = w, v, tuple((b, a) for a, b in dims)  # type: ignore[assignment]
    bound = math.prod(v.shape[d] for d in contract) * v.bound * w.bound
    m.add(f"lax.dot_general({lhs.name}, {rhs.name}, {dims})", [lhs, rhs], bound)


@on(lambda v: v.rank > 0)
def reduce(m: Maker, v: Var) -> None:
    dims = m.subset(range(v.rank))
    count = math.prod(v.shape[d] for d in dims)
    if v.dtype == "bool":
        m.add(f"{v.name}.{m.pick(('any', 'all'))}({dims})", [v])
        return
    kind = m.pick(("sum", "max", "min", "prod", "mean", "init", "argmax", "other"))
    if kind == "init" and count == 1:  # XLA drops the initial value
        kind = "sum"
    if kind == "argmax":
        m.add(f"jnp.{m.pick(('argmax', 'argmin'))}({v.name}, {dims[0]})", [v])
    elif kind == "other" and is_float(v):
        m.add(f"jax.nn.{m.pick(('softmax', 'logsumexp'))}({v.name}, {dims})", [v], v.bound + 8)
    elif kind == "other" and (m.flag() or count == 1):  # as above
        w = m.value(v.shape, v.dtype)
        inits = "(np.int32(1), np.int32(0))"
        body = "lambda x, y: (x[0] * y[0], x[1] * y[0] + y[1])"
        text = f"lax.reduce(({v.name}, {w.name}), {inits}, {body}, ({dims[0]},))"
        m.add_tuple(text, [v, w], BOUND, BOUND)
    elif kind == "other":
        op = m.pick(("bitwise_xor", "bitwise_or", "bitwise_and"))
        m.add(f"lax.reduce({v.name}, np.int32(3), lax.{op}, {dims})", [v])
    elif kind == "init":
        op = m.pick(("add", "max", "min", "mul"))
        digits = min(30, (count + 1) * math.log10(max(v.bound, 2)))
        bound = 10**digits if op == "mul" else v.bound * count + 2
        m.add(f"lax.reduce({v.name}, np.asarray(2, {v.name}.dtype), lax.{op}, {dims})", [v], bound)
    elif kind == "prod" and is_float(v):
        m.add(f"jnp.tanh({v.name}).prod({dims})", [v], 1.0)
    elif kind == "mean" and v.dtype == "int32":
        m.add(f"({v.name} % 3).sum({dims})", [v])
    else:
        m.add(f"{v.name}.{kind}({dims})", [v], v.bound * (count if kind == "sum" else 1))


@on(lambda v: is_number(v) and v.rank > 0)
def scan_sum(m: Maker, v: Var) -> None:
    """Cumsum and its kin."""
    dim = m.integer(0, v.rank - 1)
    op = m.pick(("cumsum", "cummax", "cumprod", "cumlogsumexp"))
    if op == "cumlogsumexp" and not is_float(v):
        op = "cummin"
    x = f"jnp.tanh({v.name})" if op == "cumprod" and is_float(v) else v.name
    m.add(f"lax.{op}({x}, {dim}, reverse={m.flag()})", [v], v.bound * v.shape[dim] + 8)


# Shapes.


@on(lambda v: v.rank < 4)
def broadcast(m: Maker, v: Var) -> None:
    shape: list[int] = []
    places: list[int] = []
    budget = LARGEST // max(v.size, 1)
    for size in v.shape:
        if m.flag(3) and len(shape) < 3:
            shape.append(m.pick([n for n in SIZES if n <= max(budget, 1)]))
            budget //= shape[-1]
        places.append(len(shape))
        expanded = size
        if size == 1 and m.flag():
            expanded = m.pick([n for n in SIZES if n <= max(budget, 1)])
            budget //= expanded
        shape.append(expanded)
    if len(shape) == v.rank or m.flag():
        shape.append(m.pick([n for n in SIZES if n <= max(budget, 1)]))
    m.add(f"lax.broadcast_in_dim({v.name}, {tuple(shape)}, {tuple(places)})", [v])


def _split(m: Maker, size: int) -> tuple[int, ...]:
    divisors = [n for n in range(2, size) if size % n == 0]
    if not divisors:
        return (size,)
    major = m.pick(divisors)
    return (major, size // major)


@on(lambda v: v.rank > 0)
def reshape(m: Maker, v: Var) -> None:
    shape = list(v.shape)
    kind = m.integer(0, 3)
    dim = m.integer(0, v.rank - 1)
    if kind == 0 and v.rank < 4:
        shape[dim : dim + 1] = _split(m, shape[dim])
    elif kind == 1 and dim + 1 < v.rank:
        shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
    elif kind == 2 and v.rank < 4:
        shape.insert(dim, 1)
    else:
        shape = list(_split(m, v.size)) if m.flag() else [v.size]
        if len(shape) == 2 and m.flag():
            shape[1:] = _split(m, shape[1])
    m.add(f"{v.name}.reshape({tuple(shape)})", [v])


@on(lambda v: v.rank > 1)
def transpose(m: Maker, v: Var) -> None:
    m.add(f"{v.name}.transpose({m.permutation(v.rank)})", [v])


@on(lambda v: v.rank > 0)
def slice_(m: Maker, v: Var) -> None:
    parts = []
    for size in v.shape:
        if m.flag():
            parts.append(":")
            continue
        start = m.integer(0, size - 1)
        stop = m.integer(start + 1, size)
        parts.append(f"{start}:{stop}:{m.integer(1, 3)}")
    m.add(f"{v.name}[{', '.join(parts)}]", [v])


@on(lambda v: v.rank > 0 and is_number(v) and v.size * 4 <= LARGEST)
def pad(m: Maker, v: Var) -> None:
    config = []
    for size in v.shape:
        low, high, inner = 0, 0, 0
        if m.flag():
            low, inner = m.integer(-1, 3), m.integer(0, 1)
            high = m.integer(-1, 3)
        if low + high + size + inner * (size - 1) < 1:
            low = high = 0
        config.append((low, high, inner))
    fill = f"np.asarray({m.pick((0, 2))}, {v.name}.dtype)"
    m.add(f"lax.pad({v.name}, {fill}, {tuple(config)})", [v])


@on(lambda v: v.rank > 0 and v.size * 3 <= LARGEST)
def concatenate(m: Maker, v: Var) -> None:
    dim = m.integer(0, v.rank - 1)
    parts = [v]
    for _ in range(m.integer(1, 2)):
        size = v.shape[dim] if m.flag() else m.pick(SIZES[:6])
        if v.size // v.shape[dim] * size <= LARGEST // 3:
            parts.append(m.value((*v.shape[:dim], size, *v.shape[dim + 1 :]), v.dtype))
    m.add(f"jnp.concatenate([{', '.join(p.name for p in parts)}], {dim})", parts)


@on(lambda v: v.rank > 0)
def reverse(m: Maker, v: Var) -> None:
    if m.flag():
        dims = m.subset(range(v.rank))
        m.add(f"lax.rev({v.name}, {dims})", [v])
    else:
        dim = m.integer(0, v.rank - 1)
        m.add(f"jnp.roll({v.name}, {m.integer(-2, 3)}, {dim})", [v])


# Indexing.


def _starts(m: Maker, shape: Sequence[int], sizes: Sequence[int]) -> tuple[str, list[Var]]:
    """Start indices as text: constants, and scalars out of the program (often out of range)."""
    texts, reads = [], []
    for size, part in zip(shape, sizes, strict=True):
        if m.flag():
            v = scalar(m, "int32")
            reads.append(v)
            texts.append(v.name)
        else:
            texts.append(f"np.int32({m.integer(-1, size - part + 1)})")
    return f"({', '.join(texts)},)", reads


@on(lambda v: v.rank > 0)
def dynamic(m: Maker, v: Var) -> None:
    """A slice somewhere, or an update there."""
    sizes = tuple(m.pick((n, m.integer(1, n))) for n in v.shape)
    starts, reads = _starts(m, v.shape, sizes)
    if m.flag():
        m.add(f"lax.dynamic_slice({v.name}, {starts}, {sizes})", [v, *reads])
        return
    w = m.value(sizes, v.dtype)
    m.add(f"lax.dynamic_update_slice({v.name}, {w.name}, {starts})", [v, w, *reads])


@on(lambda v: v.rank > 0)
def take(m: Maker, v: Var) -> None:
    dim = m.integer(0, v.rank - 1)
    index_shape = m.shape(2, max(1, LARGEST // v.size))
    if v.rank - 1 + len(index_shape) > 4:
        return
    i = m.value(index_shape, "int32")
    mode = m.pick(("clip", "wrap", "fill"))
    fill = ", fill_value=0" if mode == "fill" else ""
    m.add(f"jnp.take({v.name}, {i.name}, {dim}, mode='{mode}'{fill})", [v, i])


@on(lambda v: v.rank > 0)
def take_along(m: Maker, v: Var) -> None:
    dim = m.integer(0, v.rank - 1)
    count = m.pick([n for n in SIZES if v.size // v.shape[dim] * n <= LARGEST])
    i = m.value((*v.shape[:dim], count, *v.shape[dim + 1 :]), "int32")
    along = f"{i.name} % {v.shape[dim]}, {dim}, mode='clip'"
    m.add(f"jnp.take_along_axis({v.name}, {along})", [v, i])


@on(lambda v: v.rank > 0 and is_number(v))
def scatter(m: Maker, v: Var) -> None:
    dim = m.integer(0, v.rank - 1)
    size = v.shape[dim]
    kind = m.pick(("add", "set", "max", "min"))
    if kind == "set":  # which one of equal indices wins is not defined
        count = m.integer(1, size)
        index, reads = f"np.asarray({m.permutation(size)[:count]})", []
    else:
        i = m.value((m.pick(SIZES),), "int32")
        count, index, reads = i.shape[0], i.name, [i]
    if v.size // size * count > LARGEST:
        return
    w = m.value((*v.shape[:dim], count, *v.shape[dim + 1 :]), v.dtype)
    place = ", ".join([":"] * dim + [index])
    bound = v.bound + w.bound * (count if kind == "add" else 1)
    m.add(f"{v.name}.at[{place}].{kind}({w.name}, mode='drop')", [v, w, *reads], bound)


@on(lambda v: v.rank > 1 and is_number(v))
def points(m: Maker, v: Var) -> None:
    """Gather or scatter-add of single elements by index tuples."""
    i = m.value((m.pick(SIZES),), "int32")
    place = f"{i.name}, {i.name} * 2 + 1" + ", :" * (v.rank - 2)
    if m.flag() or v.size // (v.shape[0] * v.shape[1]) * i.size > LARGEST:
        m.add(f"{v.name}.at[{place}].get(mode='clip')", [v, i])
        return
    w = m.value((i.shape[0], *v.shape[2:]), v.dtype)
    m.add(f"{v.name}.at[{place}].add({w.name}, mode='drop')", [v, i, w], v.bound + w.bound * i.size)


@on(lambda v: v.rank > 0 and is_number(v))
def sort(m: Maker, v: Var) -> None:
    dim = m.integer(0, v.rank - 1)
    kind = m.integer(0, 3)
    if kind == 0:
        m.add(f"jnp.sort({v.name}, {dim}, descending={m.flag()})", [v])
    elif kind == 1:
        m.add(f"jnp.argsort({v.name}, {dim}, descending={m.flag()})", [v])
    elif kind == 2:
        text = f"lax.top_k({v.name}, {m.integer(1, v.shape[-1])})"
        m.add_tuple(text, [v], v.bound, float(v.shape[-1]))
    else:
        w = m.value(v.shape, m.pick(("float32", "int32")))
        text = f"lax.sort(({v.name}, {w.name}), dimension={dim}, num_keys=1)"
        m.add_tuple(text, [v, w], v.bound, w.bound)


# Values without elements, and with elements below a byte.


@on(lambda v: v.rank > 0)
def empty(m: Maker, v: Var) -> None:
    """Takes no element of a dim, marks that, and joins it to the whole again."""
    dim = m.integer(0, v.rank - 1)
    spec = m.spec((*v.shape[:dim], 0, *v.shape[dim + 1 :]))
    nothing = f"mark(lax.slice_in_dim({v.name}, 0, 0, axis={dim}), {spec!r})"
    if is_number(v) and m.flag():
        m.add(f"{v.name} + {nothing}.sum({dim}, keepdims=True)", [v])
    else:
        parts = m.pick((f"{nothing}, {v.name}", f"{v.name}, {nothing}[::-1]"))
        m.add(f"jnp.concatenate([{parts}], {dim})", [v])


@on(lambda v: v.rank > 0 and v.dtype == "int32")
def packed(m: Maker, v: Var) -> None:
    """Turns a dim of small numbers in 4 or 2 bits around."""
    dtype, spec = m.pick(("int4", "uint4", "int2", "uint2")), m.spec(v.shape)
    few = f"mark(({v.name} % 2).astype('{dtype}'), {spec!r})"
    m.add(f"lax.rev({few}, ({m.integer(0, v.rank - 1)},)).astype('int32')", [v], 1.0)


# Marks and control flow.


@on(lambda v: v.rank > 0)
def mark(m: Maker, v: Var) -> None:
    spec = m.spec(v.shape, uneven=m.settings.uneven_marks and m.flag())
    m.add(f"mark({v.name}, {spec!r})", [v])


def _body(m: Maker, params: Sequence[Var], captured: int) -> Maker:
    inner = Maker(m.draw, tuple(m.mesh.items()), m.settings, m.gradient, m)
    for _ in range(captured):
        seen = m.var()
        if seen is not None and seen not in inner.pool:
            inner.pool.append(seen)
    inner.pool += params
    inner.grow(m.integer(1, 3), SIMPLE)
    return inner


def _close(inner: Maker, carry: Var) -> tuple[str, str]:
    """What a body returns for a carry: something of its type that does not grow, and its name."""
    fits = [v for v in reversed(inner.pool) if v.type == carry.type and v.name != carry.name]
    v = inner.pick(fits) if fits else carry
    grows = carry.dtype in FLOATS and v.bound > carry.bound
    return (f"jnp.sin({v.name})" if grows else v.name), v.name


def _define(m: Maker, name: str, params: str, inner: Maker, returns: str) -> str:
    body = "\n".join([line.text for line in inner.lines] + [f"return {returns}"])
    return f"def {name}({params}):\n{textwrap.indent(body, '    ')}\n"


def _reads(m: Maker, inner: Maker, params: Sequence[str], *more: str) -> list[str]:
    local = {line.target for line in inner.lines} | set(params)
    inside = [name for line in inner.lines for name in line.reads if name not in local]
    names = {v.name for v in m.visible()}
    return [name for name in (*inside, *more) if name in names]


@on(lambda v: v.rank > 0)
def scan(m: Maker, init: Var) -> None:
    xs = m.var(lambda v: v.rank > 1 and v.shape[0] <= 8)
    trips = xs.shape[0] if xs else m.integer(1, 4)
    adds = m.flag() and is_float(init)
    f, c, x = m.name("f"), m.name("c"), m.name("s")
    bound = init.bound if not is_float(init) else max(init.bound, 1.0)
    carry = Var(c, init.type, bound)
    params = [Var(x, Type(xs.shape[1:], xs.dtype), xs.bound)] if xs else []
    inner = _body(m, params if adds else [*params, carry], 2)
    if adds:  # sums up something that does not depend on the sum
        fits = [v for v in reversed(inner.pool) if v.type == init.type]
        term = inner.pick(fits) if fits else inner.made(init.shape, init.dtype)
        result, bound = f"{c} + {term.name}", init.bound + trips * term.bound
        reads = [term.name]
    else:
        result, *reads = _close(inner, carry)
    if bound > BOUND:
        return
    stacks = [v for v in reversed(inner.pool) if v.size * trips <= LARGEST and v.rank < 4]
    y = inner.pick(stacks) if stacks and m.flag() else None
    text = _define(m, f, f"{c}, {x}", inner, f"{result}, {y.name if y else '()'}")
    target = m.name("t")
    given = f"{xs.name}" if xs else f"None, length={trips}"
    stacked = f"[0], {target}[1]" if y else "[0],"
    text += f"{target} = lax.scan({f}, {init.name}, {given}, reverse={m.flag(3)})\n"
    text += f"{target} = ({target}{stacked})"
    names = [*reads, init.name, *([xs.name] if xs else []), *([y.name] if y else [])]
    bounds = [bound, y.bound] if y else [bound]
    m.define(text, target, _reads(m, inner, (c, x), *names), *bounds)


@on(lambda v: v.rank > 0)
def loop(m: Maker, init: Var) -> None:
    """fori_loop, or a while_loop whose trip count only the data knows."""
    f, c, i = m.name("f"), m.name("c"), m.name("i")
    carry = Var(c, init.type, max(init.bound, 1.0) if is_float(init) else init.bound)
    count = scalar(m, "int32") if not m.gradient and m.flag(3) else None
    inner = _body(m, [Var(i, Type((), "int32"), 8.0), carry], 2)
    result, *reads = _close(inner, carry)
    text = _define(m, f, f"{i}, {c}", inner, result)
    target = m.name()
    if count is None:
        text += f"{target} = lax.fori_loop(0, {m.integer(1, 4)}, {f}, {init.name})"
    else:
        text += (
            f"{target} = lax.while_loop(lambda s: s[0] < jnp.clip({count.name}, 0, 3), "
            f"lambda s: (s[0] + 1, {f}(s[0], s[1])), (0, {init.name}))[1]"
        )
        reads.append(count.name)
    m.define(text, target, _reads(m, inner, (c, i), init.name, *reads), carry.bound)


@on(lambda v: v.rank > 0)
def branch(m: Maker, v: Var) -> None:
    """Cond or switch."""
    count = m.integer(2, 3)
    pred = scalar(m, "bool" if count == 2 else "int32")
    text, names, reads = "", [], [pred.name, v.name]
    bound = v.bound
    for _ in range(count):
        f, x = m.name("f"), m.name("b")
        inner = _body(m, [Var(x, v.type, v.bound)], 1)
        out = inner.pick([w for w in reversed(inner.pool) if w.type == v.type])
        bound = max(bound, out.bound)
        text += _define(m, f, x, inner, out.name)
        reads += _reads(m, inner, (x,), out.name)
        names.append(f)
    target = m.name()
    if count == 2:
        text += f"{target} = lax.cond({pred.name}, {', '.join(names)}, {v.name})"
    else:
        text += f"{target} = lax.switch({pred.name}, [{', '.join(names)}], {v.name})"
    m.define(text, target, reads, bound)


SIMPLE: tuple[Callable[[Maker], None], ...] = (
    unary, binary, dot, reduce, reshape, transpose, broadcast, slice_, select, convert,
    pad, concatenate, reverse, dynamic, dynamic, take, take_along, scatter,
    points, sort, mark, empty, packed,
)  # fmt: skip
ALL = (*SIMPLE, binary, dot, reduce, reshape, scan_sum, scan, loop, branch)


# Cases.


@st.composite
def cases(draw: Any, settings: Settings = Settings()) -> Case:  # noqa: B008
    """Programs with their arguments, specs and mesh."""
    sizes = draw(st.sampled_from(MESHES))
    mesh = tuple(zip(AXES, sizes, strict=False))
    gradient = draw(st.booleans())
    m = Maker(draw, mesh, settings, gradient)
    for _ in range(m.integer(1, 3)):
        m.argument(m.shape(), m.pick(("float32", "float32", "int32", "bfloat16")))
    m.grow(m.integer(2, settings.most_lines), ALL)
    read = {name for line in m.lines for name in line.reads}
    unread = [v.name for v in reversed(m.pool) if v.name not in read]
    results = tuple(unread[: m.integer(1, 4)])
    shapes = {v.name: v.shape for v in m.pool}
    out_specs = tuple(m.boundary_spec(shapes[name]) for name in results)
    return without_dead_lines(
        Case(mesh, tuple(m.args), tuple(m.lines), results, out_specs, gradient)
    )
