"""Experts over many TPUs: what their kernels count as."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import experts
from benchmarks.hlo.modelled import estimated_cycles
from spmd.measure.hlo import parse_module_text


def test_products_by_experts_count_rows_that_are_expected() -> None:
    text = """HloModule m, is_scheduled=true, num_partitions=8

ENTRY %main (p: bf16[64,16], q: bf16[2,16,32]) -> bf16[64,32] {
  %p = bf16[64,16]{1,0} parameter(0)
  %q = bf16[2,16,32]{2,1,0} parameter(1)
  ROOT %ragged-dot-none.1 = bf16[64,32]{1,0} custom-call(%p, %q), custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[64,16]{1,0}, bf16[2,16,32]{2,1,0}}, metadata={}
}
"""  # noqa: E501
    case: Any = SimpleNamespace(topology=SimpleNamespace(peak_flops=lambda dtype: 1e3))
    *_, product = parse_module_text(text).computations["main"]
    whole = 2 * 64 * 16 * 32
    assert estimated_cycles(product) == 0
    assert experts.ragged(case, 1e9)(product) == pytest.approx(whole / 1e3)
    assert experts.ragged(case, 1e4)(product) == pytest.approx(1e4 / 1e3)
