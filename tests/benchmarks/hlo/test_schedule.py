"""The schedule of optimized HLO: starts, dones and what lies between, as GPUs and TPUs write it."""

from __future__ import annotations

from benchmarks.hlo.schedule import read_schedule

CYCLES = 'backend_config={"window_config":{"estimated_cycles":"500"}}'

GPU = f"""HloModule m, is_scheduled=true, num_partitions=4

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %all-gather-start = (f32[8]{{0}}, f32[32]{{0}}) all-gather-start(%p), dimensions={{0}}
  %fusion.1 = f32[8]{{0}} fusion(%p), kind=kLoop, calls=%f, {CYCLES}
  %fusion.2 = f32[8]{{0}} fusion(%fusion.1), kind=kLoop, calls=%f, {CYCLES}
  %all-gather-done = f32[32]{{0}} all-gather-done(%all-gather-start)
  %all-reduce-start = f32[8]{{0}} all-reduce-start(%fusion.2), to_apply=%add
  %all-reduce-done = f32[8]{{0}} all-reduce-done(%all-reduce-start)
  ROOT %all-reduce.3 = f32[8]{{0}} all-reduce(%all-reduce-done), to_apply=%add
}}
"""

TPU = f"""HloModule m, is_scheduled=true, num_partitions=4

%started (p: bf16[8]) -> bf16[32] {{
  %p = bf16[8]{{0}} parameter(0)
  ROOT %all-gather.1 = bf16[32]{{0}} all-gather(%p), channel_id=1, dimensions={{0}}
}}

%carried (p: bf16[8]) -> bf16[32] {{
  %p = bf16[8]{{0}} parameter(0)
  ROOT %all-gather.2 = bf16[32]{{0}} all-gather(%p), channel_id=1, dimensions={{0}}
}}

%body (t: (s32[], bf16[8])) -> (s32[], bf16[8]) {{
  %t = (s32[], bf16[8]{{0}}) parameter(0)
  %x = bf16[8]{{0}} get-tuple-element(%t), index=1
  %async-collective-start.6 = (bf16[8]{{0}}, bf16[32]{{0}}) fusion(%x), kind=kCustom, calls=%started
  %fusion.7 = bf16[8]{{0}} fusion(%x), kind=kOutput, calls=%carried, {CYCLES}
  %async-collective-done.6 = bf16[32]{{0}} fusion(%fusion.7), kind=kCustom, calls=%carried
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %r = (s32[], bf16[8]{{0}}) tuple(%i, %x)
}}

%cond (t: (s32[], bf16[8])) -> pred[] {{
  %t = (s32[], bf16[8]{{0}}) parameter(0)
  ROOT %lt = pred[] constant(true)
}}

ENTRY %main (p: (s32[], bf16[8])) -> (s32[], bf16[8]) {{
  %p = (s32[], bf16[8]{{0}}) parameter(0)
  ROOT %w = (s32[], bf16[8]{{0}}) while(%p), condition=%cond, body=%body, """
TPU += """backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_pairs_of_starts_and_dones() -> None:
    schedule = read_schedule(GPU)
    found = [(f.kind, f.is_async, f.between, f.cycles) for f in schedule.flights]
    assert found == [
        ("all_gather", True, 2, 1000),
        ("all_reduce", True, 0, 0),
        ("all_reduce", False, 0, 0),
    ]
    assert (schedule.runs, schedule.async_runs) == (3, 1)
    assert schedule.cycles == 1000


def test_a_gather_that_fusions_carry_along_is_one() -> None:
    schedule = read_schedule(TPU)
    (flight,) = schedule.flights
    assert (flight.kind, flight.count, flight.is_async) == ("all_gather", 3, True)
    assert (flight.between, flight.cycles) == (1, 500)
    assert schedule.hidden_cycles == schedule.cycles == 1500
