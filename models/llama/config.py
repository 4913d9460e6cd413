"""What a model is: sizes and dtypes, validated at construction, and what follows from them.

Llama, and the families that are Llama with a difference: each difference is a field.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Literal


class ConfigError(ValueError):
    """A model configuration that cannot be built."""


RopeType = Literal["linear", "llama3"]
ROPE_TYPES: tuple[RopeType, ...] = ("linear", "llama3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are slowed down for sequences longer than those of pretraining.

    `linear` divides all of them by `factor`. `llama3` divides those whose wavelength is above
    `original_max_position_embeddings / low_freq_factor`, keeps those below
    `original_max_position_embeddings / high_freq_factor`, and interpolates in between.

    Raises:
        ConfigError: another type, a number that is missing, superfluous or out of range.
    """

    rope_type: RopeType  # `"linear"` or `"llama3"`
    factor: float  # at least 1
    low_freq_factor: float | None = None  # of `llama3` only; below `high_freq_factor`
    high_freq_factor: float | None = None  # of `llama3` only
    # of `llama3` only; tokens of a sequence in pretraining
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ConfigError(
                f"rope_type {self.rope_type!r} is not supported; {' and '.join(ROPE_TYPES)} are"
            )
        if self.factor < 1:
            raise ConfigError(f"the factor of rope scaling must be at least 1, not {self.factor}")
        own = (self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings)
        if self.rope_type == "linear":
            if any(number is not None for number in own):
                raise ConfigError("linear rope scaling has a factor and nothing else")
            return
        low, high, original = own
        if low is None or high is None or original is None:
            raise ConfigError(
                "llama3 rope scaling needs low_freq_factor, high_freq_factor and "
                "original_max_position_embeddings"
            )
        if not 0 < low < high or original < 1:
            raise ConfigError(
                f"llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor, not {low} and "
                f"{high}, and positive original_max_position_embeddings, not {original}"
            )


DTYPES = ("float32", "bfloat16", "float16")
ATTENTIONS = ("auto", "composite", "xla", "cudnn", "einsum")
MATMULS = ("dtype", "fp8")
STAGE_SCHEDULES = ("auto", "gpipe", "1f1b", "interleaved", "interleaved 1f1b")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma3_text")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
BIASED = {"none": "", "qkv": "qkv", "qkvo": "qkvo"}
"""`attention_bias` -> the letters of the projections that have a bias."""

MAY_BE_ZERO = (
    "max_window_layers", "num_experts", "num_experts_per_tok", "router_aux_loss_coef",
    "sliding_window_pattern", "norm_offset",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and dtypes of a model, under Hugging Face's names.

    Raises:
        ConfigError: sizes that are not positive or do not fit each other, an unknown dtype or
            attention.
    """

    # the family, as transformers calls it: what `config.json` is written for. What is computed
    # follows from the other fields.
    model_type: str = "llama"
    vocab_size: int  # number of tokens
    hidden_size: int  # width of the residual stream
    intermediate_size: int  # width inside the MLP
    num_hidden_layers: int  # number of decoder layers
    num_attention_heads: int  # number of query heads
    # number of key and value heads; None means one for each query head
    num_key_value_heads: int | None = None
    head_dim: int | None = None  # width of a head; None means `hidden_size / num_attention_heads`
    # which projections of attention have a bias: `none`, `qkv` or `qkvo`
    attention_bias: str = "none"
    # whether each head's queries and keys are normalized before they are rotated
    qk_norm: bool = False
    # a token sees so many tokens at most, itself included; None is all before it
    sliding_window: int | None = None
    max_window_layers: int = 0  # the first so many layers have no window
    # every so many layers one has no window, and all others do; 0 goes by `max_window_layers`
    sliding_window_pattern: int = 0
    # base of the rotary frequencies, unscaled, of layers with a window; None is `rope_theta`'s
    rope_local_base_freq: float | None = None
    # scores are divided by the square root of this; None is the width of a head
    query_pre_attn_scalar: float | None = None
    hidden_act: str = "silu"  # what the MLP's gate goes through
    norm_offset: float = 0.0  # what is added to the weights of norms
    post_norms: bool = False  # whether outputs of attention and MLP are normalized, too
    scale_embeddings: bool = False  # whether embeddings are multiplied by `sqrt(hidden_size)`
    num_experts: int = 0  # experts of each layer, of which a token takes some; 0 is one MLP for all
    num_experts_per_tok: int = 0  # how many a token takes
    # width inside an expert; None means `intermediate_size`
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True  # whether the weights of a token's experts are divided by their sum
    router_aux_loss_coef: float = 0.0  # the load-balancing loss is so many times added in training
    rms_norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    # how these are scaled, or None; a mapping of `RopeScaling`'s fields will do
    rope_scaling: RopeScaling | None = None
    # tokens of the longest sequence that the model is meant for. It limits nothing: there is no
    # table of positions.
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02  # standard deviation of fresh weights
    tie_word_embeddings: bool = False  # whether the output projection is the embedding table
    bos_token_id: int | None = None  # the token before a text, where known
    # the token, or tokens, that end a text, where known
    eos_token_id: int | tuple[int, ...] | None = None
    # whether the layers' parameters are stacked and run by one `jax.lax.scan` (short programs,
    # quick compilation) or kept apart and unrolled (faster steps)
    scan_layers: bool = True
    # which activations of a layer are kept for the backward pass; the others are recomputed. A
    # policy of `spmd.models.llama.remat`: `"none"` recomputes nothing, `"full"` everything from the
    # layer's input.
    remat: str = "none"
    remat_every: int = 1  # recompute in every n-th layer only; the others keep all activations
    # stages of a pipeline that the layers are split over (`spmd.pipeline`), which the mesh's axis
    # `stage` splits. Layers are scanned, and have no experts and no 8-bit floats.
    stages: int = 1
    stage_microbatches: int = 1  # into how many microbatches a batch is cut for the pipeline
    stage_schedule: str = "auto"  # the pipeline's schedule; `auto` takes the fastest
    # what computes it: an implementation of `spmd.ops.attention`, or `einsum`, which has all
    # attention weights in memory, open to marks and to any partitioner
    attention: str = "auto"
    # how many devices split a sequence in training, whose loss then puts tokens into the order in
    # which all of them have as much to do (`spmd.ops.zigzag`); 1: the usual one
    zigzag: int = 1
    # what the projections of layers are multiplied in: `dtype`, or `fp8`, 8-bit floats whose
    # scales' states are among the parameters (see `spmd.ops.fp8_dot`)
    matmul: str = "dtype"
    dtype: str = "float32"  # what activations are computed in
    param_dtype: str = "float32"  # what parameters are stored in

    def __post_init__(self) -> None:
        # What JSON makes of a scaling and a tuple becomes these again.
        if isinstance(self.rope_scaling, Mapping):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        if isinstance(self.eos_token_id, list):
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        for name, value in vars(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or name.endswith("_token_id"):
                continue
            if value < 0 or (value == 0 and name not in MAY_BE_ZERO):
                raise ConfigError(f"{name} must be positive, not {value}")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} does not divide into num_attention_heads "
                f"{self.num_attention_heads} heads; change one or set head_dim"
            )
        if self.num_attention_heads % self.kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.kv_heads}: every key head serves as many query heads"
            )
        if self.head_width % 2:
            raise ConfigError(
                f"a head is {self.head_width} wide; rotary embeddings pair its two halves, "
                "so it has to be even"
            )
        for field, known in (
            ("model_type", MODEL_TYPES),
            ("attention_bias", tuple(BIASED)),
            ("hidden_act", ACTIVATIONS),
            ("attention", ATTENTIONS),
            ("matmul", MATMULS),
            ("stage_schedule", STAGE_SCHEDULES),
            ("dtype", DTYPES),
            ("param_dtype", DTYPES),
        ):
            if getattr(self, field) not in known:
                raise ConfigError(f"{field} is {getattr(self, field)!r}, not one of {known}")
        if self.zigzag > 1 and self.attention == "einsum":
            raise ConfigError("einsum attention knows no zigzag order; choose another attention")
        if self.hidden_act != "silu" and self.num_experts:
            raise ConfigError(f"experts are computed with silu, not with {self.hidden_act}")
        if self.num_experts and not 0 < self.num_experts_per_tok <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok is {self.num_experts_per_tok}; a token takes from 1 to "
                f"{self.num_experts} of num_experts {self.num_experts}"
            )
        uneven = [str(len(span)) for span, _ in self.window_spans if len(span) % self.remat_every]
        if self.scan_layers and uneven:
            raise ConfigError(
                f"remat_every {self.remat_every} does not divide {' and '.join(uneven)} layers, as "
                "it has to where layers are scanned (those with a window and those without apart); "
                "choose a divisor, or unroll the layers (scan_layers=False)"
            )
        if self.stages == 1:
            return
        if not self.scan_layers or self.num_experts or self.matmul == "fp8":
            raise ConfigError(
                f"{self.stages} stages need scanned layers (scan_layers=True) without experts and "
                "without fp8, whose states and loads are of whole batches"
            )
        uneven = [
            str(len(s)) for s, _ in self.window_spans if len(s) % (self.stages * self.remat_every)
        ]
        if uneven:
            raise ConfigError(
                f"{self.stages} stages of groups of remat_every {self.remat_every} layers do not "
                f"divide {' and '.join(uneven)} layers (those with a window and those without "
                "apart)"
            )

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def expert_width(self) -> int:
        """Width inside an expert; inside the MLP if there are none."""
        return (self.num_experts and self.moe_intermediate_size) or self.intermediate_size

    @property
    def window_spans(self) -> tuple[tuple[range, int | None], ...]:
        """The layers in order, those with one window together: (their indices, the window)."""
        first, pattern = self.max_window_layers, self.sliding_window_pattern

        def window(layer: int) -> int | None:
            has_one = (layer + 1) % pattern != 0 if pattern else layer >= first
            return self.sliding_window if has_one else None

        grouped = itertools.groupby(range(self.num_hidden_layers), window)
        found = ((list(span), size) for size, span in grouped)
        return tuple((range(span[0], span[-1] + 1), size) for span, size in found)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter, by path; those under `layers/` exist once for each layer.

        Weights are (out, in), as in Hugging Face's checkpoints.
        """
        hidden, inner = self.hidden_size, self.expert_width
        q_width = self.num_attention_heads * self.head_width
        kv_width = self.kv_heads * self.head_width
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens/weight": (self.vocab_size, hidden),
            "layers/input_layernorm/weight": (hidden,),
            "layers/self_attn/q_proj/weight": (q_width, hidden),
            "layers/self_attn/k_proj/weight": (kv_width, hidden),
            "layers/self_attn/v_proj/weight": (kv_width, hidden),
            "layers/self_attn/o_proj/weight": (hidden, q_width),
            "layers/post_attention_layernorm/weight": (hidden,),
        }
        if self.post_norms:
            for place in ("pre", "post"):
                shapes[f"layers/{place}_feedforward_layernorm/weight"] = (hidden,)
        mlp = {
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        if self.num_experts:
            shapes["layers/mlp/gate/weight"] = (self.num_experts, hidden)
        for name, shape in mlp.items():
            experts = f"layers/mlp/experts/{name}/weight", (self.num_experts, *shape)
            path, whole = experts if self.num_experts else (f"layers/mlp/{name}/weight", shape)
            shapes[path] = whole
        shapes["norm/weight"] = (hidden,)
        for letter in BIASED[self.attention_bias]:
            path = f"layers/self_attn/{letter}_proj"
            shapes[f"{path}/bias"] = shapes[f"{path}/weight"][:1]
        if self.qk_norm:
            shapes |= {f"layers/self_attn/{x}_norm/weight": (self.head_width,) for x in "qk"}
        if not self.tie_word_embeddings:
            shapes["lm_head/weight"] = (self.vocab_size, hidden)
        return shapes

    def parameter_count(self) -> int:
        """Number of parameters in the whole model, all experts included."""
        return sum(
            math.prod(shape) * (self.num_hidden_layers if path.startswith("layers/") else 1)
            for path, shape in self.parameter_shapes().items()
        )
