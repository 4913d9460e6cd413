"""The arithmetic that a token of training is credited with."""

from typing import Literal

from spmd.models.llama.config import LlamaConfig

FlopConvention = Literal["causal", "palm"]
"""How an MFU counts; see `flops_per_token`."""

FLOP_CONVENTIONS: tuple[FlopConvention, ...] = ("causal", "palm")


def flops_per_token(
    config: LlamaConfig, seq_len: int, convention: FlopConvention = "causal"
) -> float:
    """FLOPs that one token of a training step (forward and backward) is credited with.

    Two conventions are in use, and their MFUs are not comparable:

    - `"causal"`: 6 for every parameter that multiplies something (the embedding table is
      only looked up, unless it is tied to the output), plus `6 * layers * heads * head_dim *
      seq_len` for attention, of which a causal model needs only half; with a window, for as
      many keys as a token sees in the mean. `head_dim` is the mean of keys' and values'.
    - `"palm"`: 6 for every parameter, plus `12 * layers * heads * head_dim * seq_len`:
      attention as if no position were masked (Chowdhery et al. 2022, appendix B).

    Recomputed activations count in neither, nor experts that a token does not take.

    Args:
        convention: `"causal"` or `"palm"`.
    """
    heads, key, value = config.num_attention_heads, config.head_width, config.v_head_dim
    width = heads * (key + (value or key)) / 2
    idle = config.num_experts - config.num_experts_per_tok
    idle *= config.num_hidden_layers - config.first_k_dense_replace
    parameters = config.parameter_count() - idle * (3 * config.hidden_size * config.expert_width)
    if convention == "palm":
        return 6.0 * parameters + 12.0 * config.num_hidden_layers * width * seq_len
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    keys = 0.0
    for span, window in config.window_spans:
        most = min(window or seq_len, seq_len)
        keys += len(span) * most * (2 - most / seq_len)  # twice what is seen in the mean
    return 6.0 * (parameters - looked_up) + 6.0 * width * keys
