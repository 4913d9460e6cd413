"""The predicted schedule on hand-made local programs: what hides behind what."""

import dataclasses
from typing import Any

import pytest

from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, OpKind, Program, Region
from spmd.ir.types import DotDims, TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.predict.timeline import COMPUTE, Timeline, predict_timeline
from spmd.reshard.comm import collective_seconds

MESH = Mesh(None, (4, 2), ("data", "model"))
A100 = Topology("a100:8")
TOPOLOGY = Topology("a100:8", dataclasses.replace(A100.chip, overlap=1.0))
N = 4096
WHOLE, PIECE = TensorType((N, N), "bf16"), TensorType((N // 4, N), "bf16")
DOT = 2 * N**3 / TOPOLOGY.peak_flops("bf16")
GATHER = collective_seconds("all_gather", (0, 1), PIECE.bytes, WHOLE.bytes, MESH, TOPOLOGY)


def program(make: Any) -> Program:
    """A local program of `x` (whole) and `w` (a piece over data); `make(b, x, w)` -> results."""
    b = Builder()
    x, w = b.value(WHOLE), b.value(PIECE)
    b.begin(True)
    results = make(b, x, w)
    body = b.end((x, w), results)
    return Program("main", tuple(b.types), body, ("x", "w"), ("y",) * len(results))


def dot(b: Builder, x: int, y: int) -> int:
    dims = {"dot_dimension_numbers": DotDims((), (), (1,), (0,))}
    return b.op("stablehlo.dot_general", (x, y), (WHOLE,), dims)[0]


def gather(b: Builder, w: int, axes: tuple[int, ...] = (0, 1)) -> int:
    return b.op("stablehlo.all_gather", (w,), (WHOLE,), {"axes": axes, "all_gather_dim": 0})[0]


def timeline(make: Any) -> Timeline:
    return predict_timeline(program(make), MESH, TOPOLOGY)


def test_communication_hides_behind_independent_arithmetic() -> None:
    def make(b: Builder, x: int, w: int) -> list[int]:
        whole = gather(b, w)
        return [dot(b, dot(b, x, x), whole)]

    found = timeline(make)
    assert GATHER < DOT
    assert found.seconds == pytest.approx(2 * DOT)
    assert found.comm_seconds == pytest.approx(GATHER)
    assert found.exposed_seconds == pytest.approx(0)
    assert [slot.lane for slot in found.slots] == ["data", COMPUTE, COMPUTE]
    assert found.slots[0].start == found.slots[1].start == 0
    # What hides costs what the chip says.
    assert 0 < A100.chip.overlap < 1
    found = predict_timeline(program(make), MESH, A100)
    assert found.seconds == pytest.approx(2 * DOT + (1 - A100.chip.overlap) * GATHER)
    assert found.exposed_seconds == pytest.approx((1 - A100.chip.overlap) * GATHER)


def test_a_reader_waits_for_communication() -> None:
    found = timeline(lambda b, x, w: [dot(b, x, gather(b, w))])
    assert found.seconds == pytest.approx(GATHER + DOT)
    assert found.exposed_seconds == pytest.approx(GATHER)


def test_what_comes_later_goes_first_where_arithmetic_waits() -> None:
    found = timeline(lambda b, x, w: [dot(b, x, gather(b, w)), b.binary("add", x, x)])
    added = 2 * WHOLE.bytes / TOPOLOGY.hbm_bandwidth
    assert added < GATHER
    assert found.compute_seconds == pytest.approx(DOT + added)
    assert found.seconds == pytest.approx(GATHER + DOT)


@pytest.mark.parametrize("chip", ["a100", "h200"])
def test_8_bit_operands_are_transposed_once(chip: str) -> None:
    eight = TensorType((N, N), "f8E4M3FN")
    b = Builder()
    x, y = b.value(eight), b.value(eight)
    b.begin(True)
    rows_by_columns = {"dot_dimension_numbers": DotDims((), (), (1,), (0,))}
    rows_by_rows = {"dot_dimension_numbers": DotDims((), (), (1,), (1,))}
    results = [
        b.op("stablehlo.dot_general", (x, y), (WHOLE,), dims)[0]
        for dims in (rows_by_rows, rows_by_columns, rows_by_columns)
    ]
    types = b.types
    local = Program("main", tuple(types), b.end((x, y), results), ("x", "y"), ("a", "b", "c"))
    topology = Topology(f"{chip}:8")
    found = predict_timeline(local, MESH, topology)
    copies = [slot for slot in found.slots if slot.op.name == "stablehlo.transpose"]
    assert len(copies) == (chip == "h200")
    for copy in copies:
        assert copy.seconds == pytest.approx(2 * eight.bytes / topology.chip.byte_transpose)


def test_collectives_queue_over_the_same_links_alone() -> None:
    def make(axes: tuple[int, ...]) -> Any:
        return lambda b, x, w: [gather(b, w), gather(b, w, axes)]

    assert timeline(make((0, 1))).seconds == pytest.approx(2 * GATHER)
    found = timeline(make((2,)))
    assert {slot.lane for slot in found.slots} == {"data", "model"}
    assert found.seconds < found.comm_seconds


def test_what_is_computed_inside_its_reader_takes_no_time() -> None:
    def make(b: Builder, x: int, w: int) -> list[int]:
        y = b.op("stablehlo.add", (x, x), (WHOLE,), {})[0]
        y = b.op("stablehlo.multiply", (y, x), (WHOLE,), {})[0]
        return [b.op("stablehlo.negate", (y,), (WHOLE,), {})[0]]

    (slot,) = timeline(make).slots
    assert slot.op.name == "stablehlo.negate"
    assert slot.end == pytest.approx(2 * WHOLE.bytes / TOPOLOGY.hbm_bandwidth)


def loop(b: Builder, x: int, trips: int, body: Any) -> int:
    """A while over (counter, x)."""
    i32, flag = TensorType((), "i32"), TensorType((), "i1")
    zero, one, end = (b.constant(n, "i32") for n in (0, 1, trips))
    i, h = b.value(i32), b.value(WHOLE)
    b.begin(False)
    less = {"comparison_direction": "LT", "compare_type": "SIGNED"}
    cond = b.end((i, h), b.op("stablehlo.compare", (i, end), (flag,), less))
    i, h = b.value(i32), b.value(WHOLE)
    b.begin(False)
    result = body(b, h)
    step = b.op("stablehlo.add", (i, one), (i32,), {})[0]
    region = b.end((i, h), (step, result))
    types = (i32, WHOLE)
    results = tuple(b.value(t) for t in types)
    kind = OpKind("stablehlo.while", types, types, {})
    regions: tuple[Region, ...] = (cond, region)
    b.append(Op(kind, (zero, x), results, regions))
    return results[1]


def test_loops_run_as_often_as_they_say() -> None:
    def make(b: Builder, x: int, w: int) -> list[int]:
        return [loop(b, x, 10, lambda b, h: dot(b, h, gather(b, w)))]

    found = timeline(make)
    assert found.seconds == pytest.approx(10 * (GATHER + DOT))
    assert found.comm_seconds == pytest.approx(10 * GATHER)
    outer = found.slots[0]
    assert (outer.op.name, outer.trips, outer.depth) == ("stablehlo.while", 1, 0)
    assert outer.end == pytest.approx(found.seconds)
    assert {(slot.trips, slot.depth) for slot in found.slots[1:]} == {(10, 1)}
