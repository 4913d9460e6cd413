import dataclasses

import pytest

from models.llama.config import ConfigError
from models.llama.named import named_config


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match="no model is called 'llama9'; there are tiny, quickstart"
    ):
        named_config("llama9")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("llama3.3-70b", 70_553_706_496),
        ("mistral-7b", 7_241_732_096),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
    ],
)
def test_published_parameter_counts(name, count):
    assert named_config(name).parameter_count() == count


def test_published_rotary_embeddings():
    """As in the published config.json files."""
    assert named_config("llama2-7b").rope_theta == 10_000
    assert named_config("llama3-8b").rope_theta == 500_000
    assert named_config("llama3-70b").rope_scaling is None
    published = {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = {"llama3.1-405b": 8, "llama3.2-1b": 32, "llama3.2-3b": 32, "llama3.3-70b": 8}
    for name, factor in factors.items():
        config = named_config(name)
        assert config.rope_scaling is not None
        assert dataclasses.asdict(config.rope_scaling) == {**published, "factor": factor}
        assert config.max_position_embeddings == 131_072
    assert [named_config(f"llama3.2-{size}").head_width for size in ("1b", "3b")] == [64, 128]


def test_quickstart_is_small():
    assert 1e6 < named_config("quickstart").parameter_count() < 5e6
