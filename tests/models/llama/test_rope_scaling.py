import pytest

from models.llama.config import ConfigError, RopeScaling


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "yarn", "factor": 2.0}, "rope_type 'yarn' is not supported"),
        ({"rope_type": "linear", "factor": 0.5}, "must be at least 1, not 0.5"),
        ({"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0}, "and nothing else"),
        ({"rope_type": "llama3", "factor": 2.0}, "needs low_freq_factor, high_freq_factor and"),
        (
            {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 16,
            },
            "0 < low_freq_factor < high_freq_factor, not 4.0 and 1.0",
        ),
    ],
)
def test_bad_scalings_are_errors(fields, message):
    with pytest.raises(ConfigError, match=message):
        RopeScaling(**fields)
