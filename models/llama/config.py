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


RopeType = Literal["linear", "llama3", "yarn"]
ROPE_NUMBERS: Mapping[RopeType, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "beta_slow", "beta_fast", "mscale", "mscale_all_dim", "truncate",
        "original_max_position_embeddings",
    ),
}  # fmt: skip
"""Type -> the numbers of `RopeScaling` that it has beside the factor."""
ROPE_TYPES = tuple(ROPE_NUMBERS)
OPTIONAL = {"mscale", "mscale_all_dim", "truncate"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are slowed down for sequences longer than those of pretraining.

    `linear` divides all of them by `factor`. `llama3` divides those whose wavelength is above
    `original_max_position_embeddings / low_freq_factor`, keeps those below
    `original_max_position_embeddings / high_freq_factor`, and interpolates in between. `yarn`
    (Peng et al. 2023) divides the frequencies of pairs that turn less than `beta_slow` times in so
    many tokens, keeps those above `beta_fast`, and magnifies what is rotated.

    Raises:
        ConfigError: another type, a number that is missing, superfluous or out of range.
    """

    rope_type: RopeType  # one of `ROPE_TYPES`
    factor: float  # at least 1
    low_freq_factor: float | None = None  # of `llama3` only; below `high_freq_factor`
    high_freq_factor: float | None = None  # of `llama3` only
    # of `llama3` and `yarn`; tokens of a sequence in pretraining
    original_max_position_embeddings: int | None = None
    beta_slow: float | None = None  # of `yarn` only; below `beta_fast`
    beta_fast: float | None = None  # of `yarn` only
    mscale: float | None = None  # of `yarn`, which may lack it and the next; see `magnitude`
    mscale_all_dim: float | None = None
    # of `yarn`: False lets the slowing begin and end between two pairs of entries, as in gpt-oss;
    # else it does at whole ones
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ConfigError(
                f"rope_type {self.rope_type!r} is not supported; {', '.join(ROPE_TYPES)} are"
            )
        if self.factor < 1:
            raise ConfigError(f"the factor of rope scaling must be at least 1, not {self.factor}")
        own = ROPE_NUMBERS[self.rope_type]
        every = {name for names in ROPE_NUMBERS.values() for name in names}
        given = {name for name in every if getattr(self, name) is not None}
        if not set(own) - OPTIONAL <= given <= set(own):
            needed = f"{', '.join(own[:-1])} and {own[-1]}," if own else "a factor"
            raise ConfigError(f"{self.rope_type} rope scaling needs {needed} and nothing else")
        if not own:
            return
        (low, high), original = own[:2], self.original_max_position_embeddings
        below, above = getattr(self, low), getattr(self, high)
        if not 0 < below < above or not original or original < 1:
            raise ConfigError(
                f"{self.rope_type} rope scaling needs 0 < {low} < {high}, not {below} and "
                f"{above}, and positive original_max_position_embeddings, not {original}"
            )

    def _magnified(self, share: float) -> float:
        return 0.1 * share * math.log(self.factor) + 1.0

    @property
    def magnitude(self) -> float:
        """What rotated entries are multiplied by."""
        if self.rope_type != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._magnified(self.mscale) / self._magnified(self.mscale_all_dim)
        return self._magnified(1.0)

    @property
    def scores(self) -> float:
        """What the scores of latent attention are multiplied by."""
        return self._magnified(self.mscale_all_dim or 0.0) ** 2


DTYPES = ("float32", "bfloat16", "float16")
ATTENTIONS = ("auto", "composite", "xla", "cudnn", "einsum")
MATMULS = ("dtype", "fp8")
STAGE_SCHEDULES = ("auto", "gpipe", "1f1b", "interleaved", "interleaved 1f1b")
MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma3_text"),
    *("deepseek_v2", "deepseek_v3", "gpt_oss"),
)
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
BIASED = {"none": "", "qkv": "qkv", "qkvo": "qkvo"}
"""`attention_bias` -> the letters of the projections that have a bias."""

LAYERS = "layers/"
"""What the paths of parameters of layers begin with."""

DENSE = "dense/"
"""What stands before that for those layers that have one MLP in a model with experts."""

POST_NORMS = ("pre_feedforward", "post_feedforward")
Shapes = dict[str, tuple[int, ...]]

MAY_BE_ZERO = (
    "max_window_layers", "num_experts", "num_experts_per_tok", "router_aux_loss_coef",
    "router_bias_rate",
    "sliding_window_pattern", "norm_offset", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "n_shared_experts", "first_k_dense_replace", "hot_experts",
)  # fmt: skip
SCORINGS = ("softmax", "sigmoid")


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
    # whether each query head has a score of a key without value (`spmd.ops.attention`)
    attention_sinks: bool = False
    # a token sees so many tokens at most, itself included; None is all before it
    sliding_window: int | None = None
    max_window_layers: int = 0  # the first so many layers have no window
    # every so many layers one has no window, and all others do; 0 goes by `max_window_layers`
    sliding_window_pattern: int = 0
    # base of the rotary frequencies, unscaled, of layers with a window; None is `rope_theta`'s
    rope_local_base_freq: float | None = None
    # scores are divided by the square root of this; None is the width of a head
    query_pre_attn_scalar: float | None = None
    # latent attention (DeepSeek-AI 2024, *DeepSeek-V2*, section 2.1): the keys and values of all
    # heads are made from so many numbers of a token; 0 is the usual attention
    kv_lora_rank: int = 0
    q_lora_rank: int | None = None  # likewise the queries, or None
    qk_nope_head_dim: int = 0  # how much of a head's queries and keys is not rotated
    qk_rope_head_dim: int = 0  # how much is; these keys are the same for all heads
    v_head_dim: int = 0  # width of a head's values
    hidden_act: str = "silu"  # what the MLP's gate goes through
    norm_offset: float = 0.0  # what is added to the weights of norms
    post_norms: bool = False  # whether outputs of attention and MLP are normalized, too
    scale_embeddings: bool = False  # whether embeddings are multiplied by `sqrt(hidden_size)`
    num_experts: int = 0  # experts of each layer, of which a token takes some; 0 is one MLP for all
    num_experts_per_tok: int = 0  # how many a token takes
    # width inside an expert; None means `intermediate_size`
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True  # whether the weights of a token's experts are divided by their sum
    # experts and their router have biases, and gates are cut off there (`spmd.ops.experts`)
    swiglu_limit: float | None = None
    router_aux_loss_coef: float = 0.0  # the load-balancing loss is so many times added in training
    # in a step of training, each bias of a sigmoid router goes so far towards even loads
    router_bias_rate: float = 0.0
    # an MLP beside the experts that all tokens go through, as wide as so many of them
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0  # the first so many layers have one MLP in the experts' place
    # how an expert's share in a token follows from its logit; with `sigmoid` a bias, which is not
    # trained, is added where experts are chosen
    scoring_func: str = "softmax"
    n_group: int = 1  # experts are in so many groups, side by side
    topk_group: int = 1  # a token takes those of so many, whose best two have the largest shares
    routed_scaling_factor: float = 1.0  # what the weights of a token's experts are multiplied by
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
    # `stage` splits. Layers are scanned, and have no 8-bit floats.
    stages: int = 1
    stage_microbatches: int = 1  # into how many microbatches a batch is cut for the pipeline
    stage_schedule: str = "auto"  # the pipeline's schedule; `auto` takes the fastest
    # so many experts that most tokens of a batch take are computed in training where the tokens are
    hot_experts: int = 0
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
        if self.rope_width % 2:
            raise ConfigError(
                f"a head is {self.rope_width} wide; rotary embeddings pair its two halves, "
                "so it has to be even"
            )
        for field, known in (
            ("model_type", MODEL_TYPES),
            ("attention_bias", tuple(BIASED)),
            ("hidden_act", ACTIVATIONS),
            ("scoring_func", SCORINGS),
            ("attention", ATTENTIONS),
            ("matmul", MATMULS),
            ("stage_schedule", STAGE_SCHEDULES),
            ("dtype", DTYPES),
            ("param_dtype", DTYPES),
        ):
            if getattr(self, field) not in known:
                raise ConfigError(f"{field} is {getattr(self, field)!r}, not one of {known}")
        if self.attention_sinks and self.attention in ("einsum", "cudnn"):
            raise ConfigError(
                f"{self.attention} attention knows no sinks; choose another attention"
            )
        if self.zigzag > 1 and self.attention == "einsum":
            raise ConfigError("einsum attention knows no zigzag order; choose another attention")
        if self.hidden_act != "silu" and self.num_experts:
            raise ConfigError(f"experts are computed with silu, not with {self.hidden_act}")
        if self.num_experts and not 0 < self.num_experts_per_tok <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok is {self.num_experts_per_tok}; a token takes from 1 to "
                f"{self.num_experts} of num_experts {self.num_experts}"
            )
        router = (self.num_experts > 0, self.scoring_func, self.param_dtype)
        if self.router_bias_rate and router != (True, "sigmoid", "float32"):
            raise ConfigError(
                "router_bias_rate moves the biases by which a sigmoid router chooses experts, in "
                f"float32; here are {self.num_experts} experts, {self.scoring_func} and "
                f"param_dtype {self.param_dtype}: set it to 0, or the dtype to float32"
            )
        self._check_parts()
        uneven = [str(len(s)) for s, turns in self.spans if len(s) % self.group_size(turns)]
        if self.scan_layers and uneven:
            raise ConfigError(
                f"remat_every {self.remat_every} does not divide {' and '.join(uneven)} layers, as "
                "it has to where layers are scanned (those with a window and those without apart); "
                "choose a divisor, or unroll the layers (scan_layers=False)"
            )
        if self.stages == 1:
            return
        if not self.scan_layers or self.matmul == "fp8":
            raise ConfigError(
                f"{self.stages} stages need scanned layers (scan_layers=True) without fp8, whose "
                "states are of whole batches"
            )
        uneven = [
            str(len(s))
            for s, turns in self.spans
            if len(s) % (self.stages * self.group_size(turns))
        ]
        if uneven:
            raise ConfigError(
                f"{self.stages} stages of groups of remat_every {self.remat_every} layers do not "
                f"divide {' and '.join(uneven)} layers (those with a window and those without "
                "apart)"
            )

    def _check_parts(self) -> None:
        """Latent attention and kinds of experts."""
        own = (self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        others = (self.head_dim, self.sliding_window, self.query_pre_attn_scalar, self.qk_norm)
        fits = not any(own) and not self.q_lora_rank
        if self.kv_lora_rank:
            fits = all(own) and own[2] <= self.head_width and self.attention_bias == "none"
            fits = fits and not any(others) and self.kv_heads == self.num_attention_heads
        if not fits:
            raise ConfigError(
                "latent attention has a kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and, of "
                "at most both together, v_head_dim; one key head for each query head; and no "
                "head_dim, attention_bias, qk_norm, sliding_window or query_pre_attn_scalar"
            )
        dense, chosen = self.first_k_dense_replace, self.topk_group * self.num_experts
        fits = bool(self.num_experts) or not (dense or self.n_shared_experts or self.swiglu_limit)
        fits = fits and self.num_experts % self.n_group == 0 and self.topk_group <= self.n_group
        if self.n_group > 1:
            fits = fits and self.num_experts_per_tok * self.n_group <= chosen
            fits = fits and self.num_experts >= 2 * self.n_group
        if self.hot_experts > self.num_experts:
            raise ConfigError(
                f"hot_experts {self.hot_experts}: the model has {self.num_experts} experts; give "
                "as many at most"
            )
        if not fits or dense >= self.num_hidden_layers:
            raise ConfigError(
                f"n_shared_experts {self.n_shared_experts}, first_k_dense_replace {dense} and "
                f"swiglu_limit {self.swiglu_limit} are of models with num_experts; n_group has to "
                "divide these into groups of at least two, of which topk_group have "
                "num_experts_per_tok or more"
            )

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Width of one head's queries and keys."""
        if self.kv_lora_rank:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rope_width(self) -> int:
        """How much of a head is rotated."""
        return self.qk_rope_head_dim or self.head_width

    @property
    def rope_magnitude(self) -> float:
        """What is rotated is multiplied by it."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.magnitude

    @property
    def expert_width(self) -> int:
        """Width inside an expert; inside the MLP if there are none."""
        return (self.num_experts and self.moe_intermediate_size) or self.intermediate_size

    @property
    def window_spans(self) -> tuple[tuple[range, int | None], ...]:
        """The layers in order, those alike and with one window together: (indices, the window)."""
        first, pattern = self.max_window_layers, self.sliding_window_pattern

        def kind(layer: int) -> tuple[bool, int | None]:
            has_one = (layer + 1) % pattern != 0 if pattern else layer >= first
            return layer < self.first_k_dense_replace, self.sliding_window if has_one else None

        grouped = itertools.groupby(range(self.num_hidden_layers), kind)
        found = ((list(span), size) for (_, size), span in grouped)
        return tuple((range(span[0], span[-1] + 1), size) for span, size in found)

    @property
    def spans(self) -> tuple[tuple[range, tuple[int | None, ...]], ...]:
        """The layers in order, those that one scan runs together: (indices, windows in turns)."""
        period = self.sliding_window_pattern
        whole = self.num_hidden_layers // period * period if period > 1 else 0
        if whole <= period or self.first_k_dense_replace:
            return tuple((span, (window,)) for span, window in self.window_spans)
        rest, window = range(whole, self.num_hidden_layers), self.sliding_window
        turns = (*(window,) * (period - 1), None)
        return (range(whole), turns), *([(rest, (window,))] if rest else [])

    def group_size(self, turns: tuple[int | None, ...]) -> int:
        """How many layers of a span are one element of its scan."""
        return math.lcm(len(turns), self.remat_every)

    @property
    def stacks(self) -> dict[str, range]:
        """Layers with the same parameters: what the paths of these begin with -> which they are."""
        dense = self.first_k_dense_replace
        first = {DENSE + LAYERS: range(dense)} if dense else {}
        return {**first, LAYERS: range(dense, self.num_hidden_layers)}

    def stack_of(self, path: str) -> str | None:
        """Which of `stacks` has a parameter; None if it is not of a layer."""
        return next((stack for stack in self.stacks if path.startswith(stack)), None)

    def parameter_shapes(self) -> Shapes:
        """Shape of every parameter, by path; those of a stack exist once for each of its layers.

        Weights are (out, in), as in Hugging Face's checkpoints.
        """
        shapes: Shapes = {"embed_tokens/weight": (self.vocab_size, self.hidden_size)}
        for stack in self.stacks:
            of_layer = self._layer_shapes(has_experts=bool(self.num_experts) and stack == LAYERS)
            shapes |= {f"{stack}{path}": shape for path, shape in of_layer.items()}
        shapes["norm/weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head/weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _layer_shapes(self, has_experts: bool) -> Shapes:
        hidden, heads, keys = self.hidden_size, self.num_attention_heads, self.head_width
        attention: Shapes = {"q_proj": (heads * keys, hidden)}
        if self.q_lora_rank:
            attention = {"q_a_proj": (self.q_lora_rank, hidden)}
            attention["q_a_layernorm"] = (self.q_lora_rank,)
            attention["q_b_proj"] = (heads * keys, self.q_lora_rank)
        if latent := self.kv_lora_rank:
            attention["kv_a_proj_with_mqa"] = (latent + self.qk_rope_head_dim, hidden)
            attention["kv_a_layernorm"] = (latent,)
            attention["kv_b_proj"] = (heads * (self.qk_nope_head_dim + self.v_head_dim), latent)
        else:
            attention |= dict.fromkeys(("k_proj", "v_proj"), (self.kv_heads * keys, hidden))
        attention["o_proj"] = (hidden, heads * (self.v_head_dim or keys))
        shapes: Shapes = {"input_layernorm/weight": (hidden,)}
        shapes |= {f"self_attn/{name}/weight": shape for name, shape in attention.items()}
        for place in ("post_attention", *(POST_NORMS if self.post_norms else ())):
            shapes[f"{place}_layernorm/weight"] = (hidden,)
        blocks: Shapes = {"": (self.intermediate_size,)}
        if has_experts:
            shapes["mlp/gate/weight"] = (self.num_experts, hidden)
            if self.scoring_func == "sigmoid":
                shapes["mlp/gate/e_score_correction_bias"] = (self.num_experts,)
            if self.swiglu_limit:
                shapes["mlp/gate/bias"] = (self.num_experts,)
            blocks = {"experts/": (self.num_experts, self.expert_width)}
            if self.n_shared_experts:
                blocks["shared_experts/"] = (self.n_shared_experts * self.expert_width,)
        for block, (*experts, inner) in blocks.items():
            for name in ("gate", "up"):
                shapes[f"mlp/{block}{name}_proj/weight"] = (*experts, inner, hidden)
            shapes[f"mlp/{block}down_proj/weight"] = (*experts, hidden, inner)
            for name in ("gate", "up", "down") if has_experts and self.swiglu_limit else ():
                weight = shapes[f"mlp/{block}{name}_proj/weight"]
                shapes[f"mlp/{block}{name}_proj/bias"] = weight[:-1]
        for letter in BIASED[self.attention_bias]:
            path = f"self_attn/{letter}_proj"
            shapes[f"{path}/bias"] = shapes[f"{path}/weight"][:1]
        if self.attention_sinks:
            shapes["self_attn/sinks"] = (heads,)
        if self.qk_norm:
            shapes |= {f"self_attn/{x}_norm/weight": (self.head_width,) for x in "qk"}
        return shapes

    def parameter_count(self) -> int:
        """Number of parameters in the whole model, all experts included."""
        return sum(
            math.prod(shape) * len(self.stacks.get(self.stack_of(path) or "", [path]))
            for path, shape in self.parameter_shapes().items()
        )
