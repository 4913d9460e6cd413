"""What accelerators store: what is wide, and what stands behind a barrier."""

import pytest

from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import reducer_body
from spmd.ir.program import Program, Value
from spmd.ir.types import DotDims, TensorType
from spmd.predict.backends import XlaBackend, backend_of
from spmd.predict.fusion import Fused, Kernel, combined, stored_values

SQUARE = TensorType((64, 64), "f32")


class _Maker:
    """A program of calls and sums of one square argument."""

    def __init__(self) -> None:
        self.b = Builder()
        self.b.begin(True)
        self.x = self.b.value(SQUARE)
        self.calls = 0

    def call(self, value: Value) -> Value:
        """A library call; each is another one."""
        kind = {"number": self.calls}
        self.calls += 1
        return self.b.op("stablehlo.cholesky", (value,), (SQUARE,), kind)[0]

    def program(self, results: list[Value]) -> Program:
        body = self.b.end((self.x,), results)
        names = tuple(f"r{i}" for i in range(len(results)))
        return Program("p", tuple(self.b.types), body, ("x",), names)


@pytest.mark.parametrize(
    ("inputs", "readers", "is_stored"), [(2, 2, False), (2, 4, True), (4, 2, True)]
)
def test_a_sum_is_stored_where_its_readers_would_read_more(
    inputs: int, readers: int, is_stored: bool
) -> None:
    make = _Maker()
    terms = [make.call(make.x) for _ in range(inputs)]
    total = terms[0]
    for term in terms[1:]:
        total = make.b.binary("add", total, term)
    folds = [make.b.unary(name, total) for name in ("negate", "abs", "sign", "floor")[:readers]]
    results = [make.b.transpose(make.call(fold), (1, 0)) for fold in folds]
    stored = stored_values(make.program(results))
    assert (total in stored) == is_stored


@pytest.mark.parametrize(
    ("dtype", "rows"), [("i8", 128), ("f8E4M3FN", 1), ("bf16", 1), ("i8", 129)]
)
def test_thin_products_widen_8_bit_weights_on_their_way(dtype: str, rows: int) -> None:
    b = Builder()
    b.begin(True)
    x, w = b.value(TensorType((rows, 64), "f32")), b.value(TensorType((256, 64), dtype))
    wide = b.op("stablehlo.convert", (w,), (TensorType((256, 64), "f32"),), {})[0]
    dims = {"dot_dimension_numbers": DotDims((), (), (1,), (1,))}
    out = b.op("stablehlo.dot_general", (x, wide), (TensorType((rows, 256), "f32"),), dims)[0]
    program = Program("p", tuple(b.types), b.end((x, w), [out]), ("x", "w"), ("out",))
    stored = stored_values(program)
    assert out in stored and (wide in stored) == (dtype == "bf16" or rows > 128)


def test_nothing_is_computed_across_a_barrier() -> None:
    make = _Maker()
    flipped = make.b.unary("negate", make.x)
    (held,) = make.b.barrier((flipped,))
    program = make.program([make.call(make.b.unary("abs", held))])
    assert Fused(program, XlaBackend()).stored[flipped]
    assert not Fused(program, backend_of("cpu")).stored[flipped]  # XLA drops it there


def test_all_reduces_are_one_only_among_the_same_devices() -> None:
    def counted(*groups: tuple[tuple[int, ...], ...]) -> int:
        b, type_ = Builder(), TensorType((8,), "f32")
        b.begin()
        x, body = b.value(type_), reducer_body("add", "f32")
        for each in groups:
            b.collective("all_reduce", x, type_, (0,), body=body, groups=each)
        return len(combined([Kernel(op, op.operands, op.results) for op in b.end((), ()).ops]))

    pairs, others = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    assert counted(pairs, pairs) == 1
    assert counted(pairs, others) == 2
