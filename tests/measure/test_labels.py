"""What an op and a profile's event are: kinds, layers, collectives."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.ir.program import Frame, Loc, Program, Region
from spmd.measure.hlo import Instruction, Module, groups_of
from spmd.measure.labels import (
    ATTENTION,
    COLLECTIVES,
    COPIES,
    MATRIX,
    OTHER,
    Label,
    Labels,
    label_of,
    layer_of,
)
from spmd.measure.profile import Event
from spmd.mesh.mesh import Mesh

LINEAR, MLP = Frame("model.py", 7, "linear"), Frame("model.py", 30, "Block.<locals>.mlp")
TOP = Frame("train.py", 3, "<module>")


@pytest.mark.parametrize(
    ("scope", "layer"),
    [
        ("jit(step)/model/layer_3/mlp/dot_general", "model/layer_*/mlp"),
        ("jit(step)/jvp(model)/layer_3/mlp/dot_general", "model/layer_*/mlp"),
        ("jit(step)/transpose(jvp(model))/layer_3/mlp/transpose", "model/layer_*/mlp"),
        ("jit(step)/jvp()/while/body/closed_call/checkpoint/mlp/add", "mlp"),
        ("jit(step)/jvp(net)/jit(relu)/max", "net"),
        ("jit(step)/jvp(bsi,oi->bso)/dot_general", "mlp/linear"),
        ("jit(step)/add", "mlp/linear"),
        ("", "mlp/linear"),
    ],
)
def test_layers(scope: str, layer: str) -> None:
    assert layer_of(Loc(scope, (LINEAR, MLP, TOP))) == layer


def test_layers_without_a_scope() -> None:
    assert layer_of(Loc("jit(f)/add", (LINEAR, TOP))) == "linear"
    assert layer_of(Loc("jit(f)/add", (TOP,))) == "train.py"
    assert layer_of(Loc()) == ""


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}, dimensions={0}", [{0, 2}, {1, 3}]),
        ("replica_groups=[2,2]<=[4], dimensions={0}", [{0, 1}, {2, 3}]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", [{0, 2}, {1, 3}]),
        ("replica_groups={}, to_apply=%sum", [{0, 1, 2, 3}]),
        ("source_target_pairs={{0,1}}", []),
    ],
)
def test_groups_of_devices(text: str, groups: list[set[int]]) -> None:
    instruction = Instruction("a", "f32[]", "all-gather", f"%x), {text}", False)
    assert groups_of(instruction, Module("main", {}, 4, {})) == frozenset(map(frozenset, groups))


# Events of programs that GPUs run.

NAME = 'metadata={op_name="jit(run)/shard_map/spmd_program/jit(f)/block_1/'
HLO = f"""HloModule jit_run, num_partitions=8

%fused_dot (a: f32[8]) -> f32[8] {{
  %a = f32[8] parameter(0)
  ROOT %d = f32[8] dot(%a, %a), {NAME}dot"}}
}}

%fused_add (a: f32[8]) -> f32[8] {{
  %a.1 = f32[8] parameter(0)
  ROOT %s = f32[8] add(%a.1, %a.1), {NAME}add"}}
}}

%fused_two (a: f32[8]) -> (f32[8], f32[8]) {{
  %a.4 = f32[8] parameter(0), metadata={{op_name="args[4]"}}
  %t = f32[8] add(%a.4, %a.4), {NAME}add"}}
  ROOT %two = (f32[8], f32[8]) tuple(%a.4, %t)
}}

%async (a: f32[8]) -> f32[4] {{
  %a.2 = f32[8] parameter(0)
  ROOT %r = f32[4] reduce-scatter(%a.2), replica_groups=[4,2]<=[8], {NAME}psum"}}
}}

%carries (a: f32[8]) -> (f32[8], f32[16]) {{
  %a.5 = f32[8] parameter(0)
  %g = f32[16] all-gather(%a.5), replica_groups=[4,2]<=[8], {NAME}x"}}
  %d.5 = f32[8] dot(%a.5, %a.5), {NAME}dot"}}
  ROOT %both = (f32[8], f32[16]) tuple(%d.5, %g)
}}

%graph (a: f32[8]) -> f32[8] {{
  %a.3 = f32[8] parameter(0)
  %inner = f32[16] all-gather(%a.3), replica_groups=[4,2]<=[8], {NAME}x"}}
  ROOT %loop_add_fusion.2 = f32[8] fusion(%a.3), kind=kLoop, calls=%fused_add, {NAME}add"}}
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  %cublas-gemm.1 = (f32[8], s8[4]) custom-call(%p), custom_call_target="__cublas$lt$matmul", {NAME}x"}}
  %attn = (f32[8], u8[0]) custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax", {NAME}x"}}
  %gemm_fusion = f32[8] fusion(%p), kind=kCustom, calls=%fused_dot, {NAME}dot"}}
  %no_metadata = f32[8] fusion(%p), kind=kLoop, calls=%fused_add
  %results = (f32[8], f32[8]) fusion(%p), kind=kLoop, calls=%fused_two
  %carrying = (f32[8], f32[16]) fusion(%p), kind=kCustom, calls=%carries
  %joined = f32[8] add(%p, %p), metadata={{op_name="jit(run)/spmd_program/jit(f)/(jvp(block_1)/gather:transpose(jvp(block_2))/scatter-add)"}}
  %gather = (f32[8], f32[16]) all-gather-start(%p), replica_groups=[4,2]<=[8], {NAME}x"}}
  %scatter = ((f32[8]), f32[4]) async-start(%p), calls=%async
  %copy.3 = f32[8] copy(%p), {NAME}x"}}
  %call = f32[8] call(%p), to_apply=%graph
  ROOT %while.1 = f32[8] while(%p), condition=%c, body=%b
}}
"""  # noqa: E501

MESH = Mesh(None, (4, 2), ("data", "model"))
EMPTY = Program("f", (), Region((), (), ()), (), ())


@pytest.mark.parametrize(
    ("kernel", "op", "label"),
    [
        ("nvjet_tst_128x256", "cublas-gemm.1", Label(MATRIX, "block_*")),
        ("cutlass_80_tensorop", "", Label(MATRIX, "")),
        ("cudnn_generated_fort_native_sdpa", "attn", Label(ATTENTION, "block_*")),
        ("gemm_fusion", "gemm_fusion", Label(MATRIX, "block_*")),
        ("carrying", "carrying", Label(MATRIX, "block_*")),  # a TPU's product, a gather meanwhile
        ("no_metadata", "no_metadata", Label(OTHER, "block_*")),
        ("results", "results", Label(OTHER, "block_*")),  # one of its results has a name
        ("joined", "joined", Label(OTHER, "block_*")),  # of two ops
        ("MemcpyD2D", "copy.3", Label(COPIES, "block_*")),
        ("Memset", "", Label(COPIES, "")),
        ("ncclDevKernel_AllGather_RING_LL", "", Label(COLLECTIVES, "", "all_gather")),
        ("ncclDevKernel_SendRecv(args<4096ul>)", "x.1", Label(COLLECTIVES, "", "send_recv")),
        ("ncclKernel", "", Label(COLLECTIVES, "", "nccl")),
        ("loop_add_fusion_2", "call", Label(OTHER, "block_*")),  # in a CUDA graph
        ("nvjet_tst_64x8", "call", Label(MATRIX, "")),
        ("MemcpyD2H", "while.1", Label(COPIES, "")),  # whether the loop goes on
        ("some_kernel", "unknown.7", Label(OTHER, "")),
    ],
)
def test_kernels(kernel: str, op: str, label: Label) -> None:
    assert Labels(HLO, EMPTY, MESH).of(Event(0, kernel, op, 0.0, 1.0)) == label


def test_what_only_spans_others_has_no_label() -> None:
    labels = Labels(HLO, EMPTY, MESH)
    assert labels.of(Event(0, "while.1", "while.1", 0.0, 1.0)) is None
    assert labels.of(Event(0, "call", "call", 0.0, 1.0)) is None


def test_collectives_are_named_by_their_groups(mesh: spmd.Mesh) -> None:

    def f(x: Any, w: Any) -> Any:
        with jax.named_scope("block_1"):
            return x @ w

    specs = ((None, "model"), ("model", None))
    jitted = spmd.jit(f, mesh=mesh, in_specs=specs, out_specs=(None, None))
    program = jitted.lower(jnp.ones((8, 16)), jnp.ones((16, 8))).stages.optimized.program
    (ours,) = [label_of(op, mesh) for op in program.walk() if op.collective]
    assert ours == Label(COLLECTIVES, "block_*", "all_reduce over model")
    labels = Labels(HLO, program, mesh)
    for op, kind in (("gather", "all_gather"), ("scatter", "reduce_scatter")):
        found = labels.of(Event(0, "ncclDevKernel", op, 0.0, 1.0))
        assert found == Label(COLLECTIVES, "block_*", f"{kind} over model")
