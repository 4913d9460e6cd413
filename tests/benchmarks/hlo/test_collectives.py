"""The reader of optimized HLO, on every form of every collective, and on what XLA really writes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from benchmarks.hlo.collectives import HloCollective, hlo_collectives
from benchmarks.hlo.runs import matmul_flops
from spmd.errors import ArgumentError
from spmd.ir.control_flow import UNKNOWN_TRIPS
from spmd.measure.hlo import parse_module_text

HEADER = "HloModule jit_f, is_scheduled=true, num_partitions=8\n\n"
SUM = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

"""


def module(*lines: str, before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"{HEADER}{SUM}{before}ENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def computation(name: str, *lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"%{name} (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n{body}\n}}\n\n"


def known(trips: int) -> str:
    return f', backend_config={{"known_trip_count":{{"n":"{trips}"}},"known_init_step":{{}}}}'


def read(*lines: str) -> tuple[str, int, int]:
    (found,) = hlo_collectives(module(*lines))
    return found.kind, found.bytes, found.group_size


PAIR, FOUR = ", replica_groups={{0,1}}", ", replica_groups={{0,1,2,3}}"
SCATTER = "%r = f32[4]{0} reduce-scatter(%p), dimensions={0}, to_apply=%sum, replica_groups="
PERMUTE = "%c = f32[16]{0} collective-permute(%p), source_target_pairs="


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # 1024 elements of f32 arrive at each device: 4096 bytes.
        (
            "%g = f32[8,128]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,2,4,6},"
            "{1,3,5,7}}, dimensions={0}, use_global_device_ids=true",
            ("all_gather", 3072, 4),
        ),
        ("ROOT %r = bf16[64]{0} all-reduce(%p)" + PAIR, ("all_reduce", 128, 2)),
        (SCATTER + "[2,4]<=[8]", ("reduce_scatter", 48, 4)),
        (SCATTER + "[4,2]<=[2,4]T(1,0)", ("reduce_scatter", 16, 2)),
        (SCATTER + "[2,4]<=[4,2]T(1,0)", ("reduce_scatter", 48, 4)),
        ("%g = f32[16]{0} all-gather(%p), replica_groups=[4,2]<=[8]", ("all_gather", 32, 2)),
        ("%t = f32[16]{0} all-to-all(%p), replica_groups=[1,8]<=[8]", ("all_to_all", 56, 8)),
        ("%t = (f32[4]{0}, f32[4]{0}) all-to-all(%p, %q)" + PAIR, ("all_to_all", 16, 2)),
        (PERMUTE + "{{0,1},{1,0},{2,3},{3,2}}", ("collective_permute", 64, 2)),
        (PERMUTE + "{{0,0},{1,1}}", ("collective_permute", 0, 1)),
        # No groups: all devices.
        ("%r = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%sum", ("all_reduce", 56, 8)),
        ("%r = f32[8]{0} all-reduce(%p), to_apply=%sum", ("all_reduce", 56, 8)),
        # Combined: the sum of all operands.
        (
            "%r = (f32[8]{0}, /*index=1*/bf16[4,2]{1,0:T(8,128)(2,1)S(1)}) all-reduce(%p, %q)"
            + PAIR,
            ("all_reduce", 48, 2),
        ),
        # Packed and byte-sized elements.
        ("%g = s4[16]{0} all-gather(%p)" + PAIR, ("all_gather", 4, 2)),
        ("%g = pred[16]{0} all-gather(%p)" + PAIR, ("all_gather", 8, 2)),
        ("%g = f8e4m3fn[16]{0} all-gather(%p)" + PAIR, ("all_gather", 8, 2)),
    ],
)
def test_one_collective(line: str, expected: tuple[str, int, int]) -> None:
    assert read(line) == expected


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("%s = (f32[4]{0}, f32[16]{0}) all-gather-start(%p)" + FOUR, ("all_gather", 48, 4)),
        (
            "%s = ((f32[4]{0}, f32[2]{0}), (f32[16]{0}, f32[8]{0})) all-gather-start(%p, %q)"
            + FOUR,
            ("all_gather", 72, 4),
        ),
        ("%s = f32[16]{0} all-reduce-start(%p), to_apply=%sum" + FOUR, ("all_reduce", 96, 4)),
        (
            "%s = (f32[8,2]{1,0:T(8,128)}, f32[8,2]{1,0:T(8,128)}, u32[]{:S(2)}, u32[]{:S(2)})"
            " collective-permute-start(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
            ("collective_permute", 64, 4),
        ),
        (
            "%s = ((f32[16]{0}), f32[4]{0}) reduce-scatter-start(%p), to_apply=%sum" + FOUR,
            ("reduce_scatter", 48, 4),
        ),
    ],
)
def test_a_start_and_its_done_count_once(start: str, expected: tuple[str, int, int]) -> None:
    assert read(start, f"%d = f32[4]{{0}} {expected[0].replace('_', '-')}-done(%s)") == expected


def test_an_async_start_of_a_wrapped_computation_counts_once() -> None:
    wrapped = computation("wrapped", "ROOT %r = f32[4]{0} reduce-scatter(%x)" + FOUR)
    text = module(
        "%s = ((f32[16]{0}), f32[4]{0}, u32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[16]{0}), f32[4]{0}, u32[]) async-update(%s), calls=%wrapped",
        "%d = f32[4]{0} async-done(%u), calls=%wrapped",
        before=wrapped,
    )
    assert [(c.kind, c.bytes, c.count) for c in hlo_collectives(text)] == [
        ("reduce_scatter", 48, 1)
    ]


LOOP = """%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %r = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%sum
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %r)
}

%cond (s: (s32[], f32[8])) -> pred[] {
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  END
}

"""
START = ("%z = s32[] constant(0)", "%t = (s32[], f32[8]{0}) tuple(%z, %p)")
WHILE = "%w = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%body"


@pytest.mark.parametrize(
    ("number", "config", "trips"),
    [
        ("custom-call(%s)", known(5), 5),
        ("constant(7)", "", 7),
        ("custom-call(%s)", "", UNKNOWN_TRIPS),
    ],
)
def test_loops_multiply(number: str, config: str, trips: int) -> None:
    end = f"%n = s32[] {number}\n  ROOT %l = pred[] compare(%i, %n), direction=LT"
    text = module(*START, WHILE + config, before=LOOP.replace("END", end))
    assert [c.count for c in hlo_collectives(text)] == [trips]


def test_loops_in_loops_calls_and_branches_are_followed_and_dead_code_is_not() -> None:
    called = (
        computation("outer", f"ROOT {WHILE}{known(3)}")
        + computation("branch", "ROOT %g = f32[8]{0} all-gather(%x), dimensions={0}" + PAIR)
        + computation("dead", "ROOT %g = f32[8]{0} all-to-all(%x)" + PAIR)
    )
    text = module(
        "%w = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%outer" + known(3),
        "%c = f32[8]{0} conditional(%k, %p, %p), branch_computations={%branch, %branch}",
        "%d = f32[8]{0} call(%p), to_apply=%branch",
        before=LOOP.replace("END", "") + called,
    )
    assert [(c.kind, c.count) for c in hlo_collectives(text)] == [
        ("all_reduce", 9),
        ("all_gather", 2),  # one of two branches, and the call
    ]


def test_of_branches_the_one_that_moves_most_counts_whatever_it_calls() -> None:
    once = computation("once", "%g = f32[16]{0} all-gather(%x), dimensions={0}" + PAIR)
    call = " = f32[8]{0} call(%x), to_apply=%once"
    calls_twice = computation("twice", f"%c{call}", f"%d{call}")
    reduces = computation("reduces", "%r = f32[8]{0} all-reduce(%x), to_apply=%sum" + PAIR)
    text = module(
        "%c = f32[8]{0} conditional(%k, %p, %p), true_computation=%reduces, "
        "false_computation=%twice",
        before=once + calls_twice + reduces,
    )
    assert [(c.kind, c.bytes, c.count) for c in hlo_collectives(text)] == [("all_gather", 32, 2)]


def test_collectives_inside_fusions_count_with_the_loops_around() -> None:
    fused = computation(
        "fused", "ROOT %g = f32[16]{0} all-gather(%x), replica_groups=[4,2]<=[8], dimensions={0}"
    )
    body = computation("run", "ROOT %f = f32[16]{0} fusion(%x), kind=kCustom, calls=%fused")
    text = module(WHILE.replace("%body", "%run") + known(6), before=fused + body)
    assert [(c.bytes, c.count) for c in hlo_collectives(text, guess_trips=False)] == [(32, 6)]


def test_unknown_trip_counts_that_matter_and_text_that_is_no_module_are_errors() -> None:
    text = module(WHILE, before=LOOP.replace("END", ""))
    with pytest.raises(ArgumentError, match="loop w communicates"):
        hlo_collectives(text, guess_trips=False)
    silent = text.replace("all-reduce(", "negate(")
    assert hlo_collectives(silent, guess_trips=False) == ()
    with pytest.raises(ArgumentError, match="no ENTRY"):
        hlo_collectives("module @main {}")


FUSED_SLICE = """%fused (y: f32[8,4], i: s32[]) -> f32[2,4] {
  %y = f32[8,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %t = f32[8,4]{1,0} bitcast(%y)
  %z = s32[] constant(0)
  ROOT %d = f32[2,4]{1,0} dynamic-slice(%t, %i, %z), dynamic_slice_sizes={2,4}
}

"""
REDUCE = "%r = f32[8,4]{1,0} all-reduce(%p), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%sum"


SLICED = "%f = f32[2,4]{1,0} fusion(%r, %i), kind=kLoop, calls=%fused"


def dynamic_slice(of: str, at: str, rows: int) -> str:
    sizes = f"dynamic_slice_sizes={{{rows},4}}"
    return f"%d = f32[{rows},4]{{1,0}} dynamic-slice({of}, {at}, %z), {sizes}"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # 128 bytes over 4 devices: an all-reduce sends 192, a reduce-scatter 96.
        ([SLICED], "reduce_scatter"),
        ([dynamic_slice("%r", "%i", 2)], "reduce_scatter"),
        # Half of it is more than one device's share.
        ([dynamic_slice("%r", "%i", 4)], "all_reduce"),
        # Somebody reads the whole of it.
        ([SLICED, "%n = f32[8,4]{1,0} negate(%r)"], "all_reduce"),
        # The slice is taken from something else, at a position that the sum decides.
        ([dynamic_slice("%q", "%r", 2)], "all_reduce"),
        ([], "all_reduce"),
    ],
)
def test_an_all_reduce_of_which_a_slice_is_used(lines: list[str], expected: str) -> None:
    text = module(REDUCE, *lines, before=FUSED_SLICE)
    (raw,) = hlo_collectives(text)
    assert (raw.kind, raw.bytes) == ("all_reduce", 192)
    (found,) = hlo_collectives(text, scatter_slices=True)
    assert (found.kind, found.bytes) == (expected, 96 if expected == "reduce_scatter" else 192)


def test_of_a_combined_all_reduce_the_sliced_operands_are_scattered() -> None:
    text = module(
        "%r = (f32[8,4]{1,0}, f32[16]{0}) all-reduce(%p, %q), to_apply=%sum" + FOUR,
        "%a = f32[8,4]{1,0} get-tuple-element(%r), index=0",
        "%b = f32[16]{0} get-tuple-element(%r), index=1",
        "%f = f32[2,4]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused",
        "%n = f32[16]{0} negate(%b)",
        before=FUSED_SLICE,
    )
    assert [(c.kind, c.bytes) for c in hlo_collectives(text)] == [("all_reduce", 288)]
    assert [(c.kind, c.bytes) for c in hlo_collectives(text, scatter_slices=True)] == [
        ("reduce_scatter", 96),
        ("all_reduce", 96),
    ]


def test_sources_come_from_either_form_of_metadata() -> None:
    old = (
        '%r = f32[8]{0} all-reduce(%p), to_apply=%sum, metadata={op_name="jit(f)/psum" '
        'source_file="/a/train.py" source_line=12}'
    )
    (found,) = hlo_collectives(module(old))
    assert found == HloCollective("all_reduce", 56, 1, 8, "jit(f)/psum", "/a/train.py:12")
    tables = (
        'FileNames\n1 "/a/train.py"\n2 "/lib/site-packages/optax/x.py"\n\n'
        'FunctionNames\n1 "train.<locals>.step"\n2 "update"\n\n'
        "FileLocations\n1 {file_name_id=1 function_name_id=1 line=30 end_line=30}\n"
        "2 {file_name_id=2 function_name_id=2 line=4 end_line=4}\n\n"
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n"
        "2 {file_location_id=2 parent_frame_id=2}\n\n"
    )
    new = '%r = f32[8]{0} all-reduce(%p), metadata={op_name="a" stack_frame_id=2}'
    text = module(new).replace(HEADER, HEADER + tables)
    assert hlo_collectives(text)[0].source == "/a/train.py:30"


def test_arithmetic_of_dots_and_convolutions_in_loops_and_fusions_also_compiled() -> None:
    fused = computation(
        "run",
        "%y = f32[8,4]{1,0} parameter(1)",
        "ROOT %d = f32[4]{0} dot(%x, %y), lhs_contracting_dims={0}, rhs_contracting_dims={0}",
    )
    body = computation("body", "ROOT %f = f32[4]{0} fusion(%x, %x), calls=%run")
    text = module(
        WHILE + known(5),
        "%i = f32[2,16,16,6]{3,2,1,0} parameter(1)",
        "%k = f32[3,5,6,7]{3,2,1,0} parameter(2)",
        "%v = f32[2,14,12,7]{3,2,1,0} convolution(%i, %k), window={size=3x5}, "
        "dim_labels=b01f_01io->b01f",
        before=fused + body,
    )
    assert matmul_flops(text) == 5 * 2 * 8 * 4 + 2 * (2 * 14 * 12 * 7) * (3 * 5 * 6)

    def layers(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0]

    compiled = jax.jit(layers).lower(jnp.ones((8, 16)), jnp.ones((3, 16, 16))).compile()
    assert matmul_flops(str(compiled.as_text())) == 3 * 2 * 8 * 16 * 16


def test_a_compiled_program(devices8: Any) -> None:
    mesh = Mesh(np.array(devices8).reshape(4, 2), ("a", "b"))
    spec = PartitionSpec("a", "b")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def run(x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            total = jax.lax.psum(jnp.sin(carry), "b")
            ring = jax.lax.ppermute(total, "a", [(i, (i + 1) % 4) for i in range(4)])
            return ring, None

        looped, _ = jax.lax.scan(step, x, None, length=5)
        whole = jax.lax.all_gather(looped, "a", tiled=True)
        parts = jax.lax.psum_scatter(jnp.cos(whole), "a", tiled=True)
        return jax.lax.all_to_all(parts, "b", 0, 1, tiled=True).reshape(parts.shape)

    text = str(run.lower(jnp.ones((32, 16))).compile().as_text())
    found = {c.kind: (c.bytes, c.count, c.group_size) for c in hlo_collectives(text)}
    assert found == {  # one device's piece has 8 x 8 elements of f32: 256 bytes
        "all_reduce": (256, 5, 2),
        "collective_permute": (256, 5, 4),
        "all_gather": (768, 1, 4),
        "reduce_scatter": (768, 1, 4),
        "all_to_all": (128, 1, 2),
    }
    assert all(__file__ in c.source for c in hlo_collectives(text))


def test_an_attribute_may_hold_line_breaks() -> None:
    """As the TPU compiler writes what a kernel says of itself."""
    kernel = (
        '%k = f32[8] custom-call(%p), custom_call_target="tpu_custom_call", '
        'backend_config={"metadata":"{\n"block": 512\n}}, metadata={op_name="kernel"}'
    )
    text = module(kernel, "ROOT %r = f32[8] all-reduce(%k), replica_groups={}, to_apply=%sum")
    (found,) = hlo_collectives(text)
    assert found.kind == "all_reduce"
    (instruction, _) = parse_module_text(text).computations["main"]
    assert instruction.rest.endswith('metadata={op_name="kernel"}')
