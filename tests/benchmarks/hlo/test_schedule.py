"""The schedule of optimized HLO: starts, dones and what lies between."""

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


def test_pairs_of_starts_and_dones() -> None:
    schedule = read_schedule(GPU)
    found = [(c.kind, c.place, c.end) for c in schedule.collectives]
    assert found == [
        ("all_gather", 1, 4),  # two fusions between
        ("all_reduce", 5, 6),
        ("all_reduce", 7, None),
    ]
    assert schedule.hidden == (True, False, False)
    assert (schedule.runs, schedule.hidden_runs) == (3, 1)
    assert schedule.cycles == schedule.hidden_cycles == 1000
