import pytest

from models.training.run.metrics import StepCost, peak_flops


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
    ],
)
def test_known_peaks(kind, tera):
    assert peak_flops(kind, "bfloat16") == tera * 1e12


def test_unknown_peaks():
    assert peak_flops("cpu", "bfloat16") is None
    assert peak_flops("NVIDIA H200", "float32") is None


def test_rates():
    cost = StepCost(
        tokens=1000, devices=4, flops_per_token={"causal": 6.0, "palm": 8.0}, peak_flops=3000.0
    )
    assert cost.rates(0.5) == {"tokens_per_s": 2000.0, "mfu_causal": 1.0, "mfu_palm": 8 / 6}


def test_no_mfu_without_a_peak():
    assert StepCost(tokens=10, devices=1, flops_per_token={"causal": 6.0}).rates(2.0) == {
        "tokens_per_s": 5.0
    }
