import dataclasses

from models.llama.config import LlamaConfig
from models.llama.flops import flops_per_token


def test_flops_per_token_of_both_conventions():
    config = LlamaConfig(
        vocab_size=10,
        hidden_size=4,
        intermediate_size=6,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    layer = 4 * 4 * 4 + 3 * 4 * 6 + 2 * 4
    multiplied = 3 * layer + 4 + 10 * 4
    attention = 3 * 4 * 100  # layers x width of all heads x sequence
    assert flops_per_token(config, 100, "causal") == 6 * multiplied + 6 * attention
    assert flops_per_token(config, 100, "palm") == 6 * (multiplied + 40) + 12 * attention
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    assert flops_per_token(tied, 100, "causal") == flops_per_token(config, 100, "causal")
    # A token sees as many before it as there are, 19 at most: (1 + ... + 19 + 81 * 20) / 100.
    windows = dataclasses.replace(config, sliding_window=20, max_window_layers=1)
    seen = 100 / 2 + 2 * (20 - 20 * 20 / 2 / 100)
    assert flops_per_token(windows, 100, "causal") == 6 * multiplied + 12 * 4 * seen
    assert flops_per_token(windows, 100, "palm") == flops_per_token(config, 100, "palm")
    assert flops_per_token(windows, 8, "causal") == flops_per_token(config, 8, "causal")
    # Of five experts as wide as the MLP a token takes two; and there is the router.
    experts = dataclasses.replace(config, num_experts=5, num_experts_per_tok=2)
    more = 6 * 3 * (3 * 4 * 6 + 5 * 4)
    for convention in ("causal", "palm"):
        both = [flops_per_token(c, 100, convention) for c in (config, experts)]
        assert both[1] - both[0] == more
