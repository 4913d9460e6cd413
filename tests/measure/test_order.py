"""Which ops kernels are of that name none: those of CUDA graphs, and collectives."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from spmd.ir.program import Program, Region
from spmd.measure.labels import Labels, Order
from spmd.measure.profile import STEP, Event, read_steps
from spmd.mesh.mesh import Mesh
from tests.measure.profiles import Made, profile

EMPTY = Program("f", (), Region((), (), ()), (), ())

KERNELS = {  # instruction -> its text and the kernel it launches, as others name it
    "gemm": ('f32[8] custom-call(%p), custom_call_target="__cublas$gemm"', "nvjet_tst_64x8"),
    "attn": ('f32[8] custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax"', "cudnn_sdpa"),
    "loop_add_fusion": ("f32[8] fusion(%p), kind=kLoop, calls=%add", "loop_add_fusion_1"),
    "gemm_fusion_dot": ("f32[8] fusion(%p), kind=kCustom, calls=%dot", "gemm_fusion_dot_9"),
    "all-gather-start": ("(f32[8], f32[16]) all-gather-start(%p)", "ncclDevKernel_AllGather_RING"),
    "all-to-all-start": (
        "(f32[8], f32[8]) all-to-all-start(%p)",
        "ncclDevKernel_SendRecv(args<9>)",
    ),
    "fusion-start": (
        "((f32[]), f32[]) fusion-start(%p), kind=kCustom, calls=%fused_sum.7.clone",
        "sum_7_fusion_1",
    ),
    "all-reduce-start": ("f32[8] all-reduce-start(%p), to_apply=%sum", "ncclDevKernel_AllReduce"),
}


def text(names: list[str]) -> str:
    return "".join(f"  %{name} = {KERNELS[stem(name)][0]}\n" for name in names)


def stem(name: str) -> str:
    return name.partition(".")[0]


def order(entry: list[str], loop: list[str] = [], backend: str = "") -> Order:  # noqa: B006
    """That of a module whose entry ends with a loop."""
    hlo = f"""HloModule jit_run, is_scheduled=true, num_partitions=2

%fused_sum.7.clone (a: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  ROOT %sum.2 = f32[] all-reduce(%a), to_apply=%sum
}}

%body (b: f32[8]) -> f32[8] {{
  %b = f32[8] parameter(0)
{text(loop)}}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
{text(entry)}  %all-gather-done = f32[16] all-gather-done(%p)
  ROOT %while = f32[8] while(%p), condition=%c, body=%body{backend}
}}
"""
    return Order(Labels(hlo, EMPTY, Mesh(None, (2,), ("data",))))


def launched(*names: str, op: str = "graph") -> list[Event]:
    """The kernels of instructions in one CUDA graph, the last to run first."""
    return [
        Event(0, KERNELS[stem(name)][1], op, 9.0 - i, 9.5 - i, (4, i))
        for i, name in enumerate(names)
    ]


def ops(order: Order, events: list[Event]) -> list[str]:
    return [event.op for event in order.name(events)]


ENTRY = ["gemm.1", "loop_add_fusion.4", "gemm.3", "all-gather-start.2", "loop_add_fusion", "gemm.7"]


@given(
    st.lists(st.sampled_from(sorted(KERNELS)), min_size=1, max_size=30),
    st.lists(st.booleans(), min_size=30, max_size=30),
    st.randoms(),
)
def test_what_names_no_op_is_found_again(stems: list[str], shown: list[bool], random: Any) -> None:
    names = [f"{name}.{i}" for i, name in enumerate(stems)]
    events = launched(*names, op="dot_general.3.1")
    events = [e._replace(op=n) if s else e for e, n, s in zip(events, names, shown, strict=False)]
    done = list(zip(events, names, strict=True))
    random.shuffle(done)
    assert ops(order(names), [event for event, _ in done]) == [name for _, name in done]


def test_loops_are_written_out_unless_their_length_is_unknown() -> None:
    known = ', backend_config={"known_trip_count":{"n":"2"}}'
    loop = ["gemm.8", "gemm.9"]
    names = [*ENTRY, *loop, *loop]
    assert ops(order(ENTRY, loop, known), launched(*names)) == names
    names = ["gemm.1", "loop_add_fusion.4", "gemm.8"]
    found = ops(order(names[:2], names[2:]), launched(*names))
    assert found == ["graph", "loop_add_fusion.4", "graph"]


def test_what_says_nothing_of_an_order() -> None:
    found = ops(order(ENTRY), launched(*ENTRY, "gemm.9"))
    assert found == [n if stem(n) != "gemm" else "graph" for n in [*ENTRY, "gemm.9"]]
    gemm, named, again, last = launched("gemm", "gemm", "gemm", "gemm")
    events = [gemm, named._replace(op="gemm.3"), again._replace(op="gemm.3"), last]
    assert ops(order(ENTRY), events) == ["gemm.1", "gemm.3", "gemm.3", "gemm.7"]
    events = [event._replace(launch=(4, 0)) for event in launched(*ENTRY)]
    found = ops(order(ENTRY), events)
    assert found == [n if stem(n) == "all-gather-start" else "graph" for n in ENTRY]


def test_launches_are_read_from_profiles() -> None:
    graph = {"hlo_op": "command_buffer_4", "correlation_id": 4}
    stream = [
        Made("nvjet_b", 10, 20, {**graph, "cuda_graph_node_id": 3}),
        Made("nvjet_a", 30, 40, {**graph, "cuda_graph_node_id": 1}),
        Made("nvjet_c", 5, 8, {"hlo_op": "gemm.1", "correlation_id": 2}),
    ]
    planes = {
        "/host:CPU": {"python": [Made(STEP, 0, 100)]},
        "/device:GPU:0": {"Stream #14(Compute)": stream},
    }
    (step,) = read_steps(profile(planes))
    found = {event.name: event.op for event in order(ENTRY).name(step.events)}
    assert found == {"nvjet_c": "gemm.1", "nvjet_a": "gemm.3", "nvjet_b": "gemm.7"}
