"""What the `config.json` of each `model_type` has, and what its keys say where they are left out.

Beside the sizes that all have there are

    mistral      a window in all layers
    qwen2        biases on q, k and v; a window in the layers from `max_window_layers` on, if
                 `use_sliding_window`
    qwen3        norms of each head's queries and keys; windows as qwen2; biases, if
                 `attention_bias`
    gemma3_text  norms of heads and of outputs, scaled embeddings, a window and other rotary
                 frequencies in all layers but every sixth
    mixtral      experts, and a window in all layers
    qwen3_moe    qwen3 with experts; a window in all layers, if `use_sliding_window`
    deepseek_v2  latent attention, experts and an MLP for all tokens beside them; one MLP in the
                 first layers
    deepseek_v3  the same with sigmoids for shares of experts, and these in groups
    gpt_oss      sinks of attention, a window in every second layer, experts with biases

Biases of an MLP of all tokens, and layers of several kinds, no family has.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from spmd.models.llama.config import ConfigError, LlamaConfig
from spmd.models.llama.named import PUBLISHED

SIZES: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
"""Keys that are fields of `LlamaConfig` too -> transformers' default for a Llama."""


@dataclasses.dataclass(frozen=True)
class Family:
    """How one `model_type` is read and written."""

    architecture: str  # transformers' class
    defaults: Mapping[str, Any]  # transformers' defaults where they are not those of a Llama
    # the field of `LlamaConfig`; None if the key `attention_bias` decides
    attention_bias: str | None = "none"
    qk_norm: bool = False  # the field
    parts: tuple[tuple[str, Any], ...] = ()  # other fields that all such models have
    # the keys of a window: none, `sliding_window` for all layers, with a switch, or those of
    # `LAYERED` or `PATTERN`
    window: Sequence[str] = ()
    # the field of `LlamaConfig` -> the keys that say it, the first as transformers writes it
    fields: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # other keys -> the values that we support
    fixed: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    # transformers' defaults of rotary frequencies: the base, and how they are scaled
    theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None

    @property
    def keys(self) -> frozenset[str]:
        """The keys that such a file has and a Llama's lacks, or has with one value only."""
        own = {key for _, keys in self.fields for key in keys} | {key for key, _ in self.fixed}
        own |= {*self.window, *(["output_router_logits"] if "num_experts_per_tok" in own else [])}
        return frozenset(own | ({"attention_bias"} if self.attention_bias is None else set()))


LAYERED = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
PATTERN = ("sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "layer_types")
SWITCHED = ("use_sliding_window", "sliding_window", "max_window_layers")

_EXPERTS = (
    ("num_experts_per_tok", ("num_experts_per_tok",)),
    ("router_aux_loss_coef", ("router_aux_loss_coef",)),
)

_QWEN: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "bos_token_id": None,
    "eos_token_id": None,
}

_DEEPSEEK_V3: Mapping[str, Any] = {
    **{name: x for name, x in PUBLISHED["deepseek-v3"].items() if name != "rope_scaling"},
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
}
_GPT_OSS: Mapping[str, Any] = {
    **{name: x for name, x in PUBLISHED["gpt-oss-120b"].items() if not name.startswith("rope")},
    "num_local_experts": 128,
}
_DEEPSEEK = (
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_shared_experts", "first_k_dense_replace", "routed_scaling_factor"),
    *("moe_intermediate_size", "num_experts_per_tok"),
)
"""DeepSeek's keys that are fields of the same name."""


def _fields(*more: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    routed = ("num_experts", ("n_routed_experts", "num_local_experts", "num_experts"))
    return (routed, *((name, (name,)) for name in (*_DEEPSEEK, *more)))


def _fixed(**usual: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    usual |= {"attention_bias": False, "moe_layer_freq": 1}
    return tuple((key, (value, None)) for key, value in usual.items())


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family("LlamaForCausalLM", {}, attention_bias=None),
        "mistral": Family(
            "MistralForCausalLM",
            {
                "intermediate_size": 14_336,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131_072,
            },
            window=("sliding_window",),
        ),
        "qwen2": Family("Qwen2ForCausalLM", _QWEN, attention_bias="qkv", window=LAYERED),
        "qwen3": Family(
            "Qwen3ForCausalLM",
            {**_QWEN, "head_dim": 128},
            attention_bias=None,
            qk_norm=True,
            window=LAYERED,
        ),
        "mixtral": Family(
            "MixtralForCausalLM",
            {
                "intermediate_size": 14_336,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131_072,
                "rms_norm_eps": 1e-5,
                "sliding_window": None,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "router_aux_loss_coef": 0.001,
            },
            window=("sliding_window",),
            fields=(("num_experts", ("num_local_experts",)), *_EXPERTS),
            fixed=(("router_jitter_noise", (0.0, None)),),
            theta=1e6,
        ),
        "qwen3_moe": Family(
            "Qwen3MoeForCausalLM",
            {
                **_QWEN,
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 24,
                "num_key_value_heads": 4,
                "num_local_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": False,
                "router_aux_loss_coef": 0.001,
            },
            attention_bias=None,
            qk_norm=True,
            window=SWITCHED,
            fields=(
                ("num_experts", ("num_local_experts", "num_experts")),
                ("moe_intermediate_size", ("moe_intermediate_size",)),
                ("norm_topk_prob", ("norm_topk_prob",)),
                *_EXPERTS,
            ),
            fixed=(("decoder_sparse_step", (1, None)), ("mlp_only_layers", ([], None))),
        ),
        "gemma3_text": Family(
            "Gemma3ForCausalLM",
            {
                "vocab_size": 262_208,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "max_position_embeddings": 131_072,
                "tie_word_embeddings": True,
                "bos_token_id": 2,
                "eos_token_id": 1,
                "query_pre_attn_scalar": 256,
                "rope_local_base_freq": 10_000.0,
                "sliding_window_pattern": 6,
            },
            qk_norm=True,
            parts=(
                ("hidden_act", "gelu_pytorch_tanh"),
                ("norm_offset", 1.0),
                ("post_norms", True),
                ("scale_embeddings", True),
            ),
            window=PATTERN,
            fields=(
                ("query_pre_attn_scalar", ("query_pre_attn_scalar",)),
                ("rope_local_base_freq", ("rope_local_base_freq",)),
            ),
            fixed=(
                ("hidden_act", ("gelu_pytorch_tanh",)),
                ("hidden_activation", ("gelu_pytorch_tanh",)),
                ("attn_logit_softcapping", (None,)),
                ("final_logit_softcapping", (None,)),
                ("use_bidirectional_attention", (False, None)),
            ),
            theta=1e6,
        ),
        "deepseek_v2": Family(
            "DeepseekV2ForCausalLM",
            {
                **{key: _DEEPSEEK_V3[key] for key in _DEEPSEEK[:5]},
                "vocab_size": 102_400,
                "n_routed_experts": 64,
                "moe_intermediate_size": 1407,
                "n_shared_experts": 2,
                "first_k_dense_replace": 0,
                "routed_scaling_factor": 1.0,
            },
            parts=(("head_dim", None), ("norm_topk_prob", False)),
            fields=_fields(),
            fixed=_fixed(
                **dict.fromkeys(("n_group", "topk_group"), 1),
                **{"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy"},
            ),
        ),
        "deepseek_v3": Family(
            "DeepseekV3ForCausalLM",
            _DEEPSEEK_V3,
            parts=(("head_dim", None), ("scoring_func", "sigmoid")),
            fields=_fields("norm_topk_prob", "n_group", "topk_group"),
            fixed=_fixed(scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True),
        ),
        "gpt_oss": Family(
            "GptOssForCausalLM",
            _GPT_OSS,
            attention_bias="qkvo",
            parts=(("attention_sinks", True),),
            window=PATTERN,
            fields=(
                ("num_experts", ("num_local_experts",)),
                ("num_experts_per_tok", ("num_experts_per_tok", "experts_per_token")),
                ("router_aux_loss_coef", ("router_aux_loss_coef",)),
                ("swiglu_limit", ("swiglu_limit",)),
            ),
            fixed=(("attention_bias", (True, None)), ("swiglu_alpha", (1.702, None))),
            theta=150_000.0,
            rope_scaling=PUBLISHED["gpt-oss-120b"]["rope_scaling"],
        ),
    }
)
"""`model_type` -> the family."""


def family_of(values: Mapping[str, Any]) -> Family:
    """The family of a `config.json`.

    Raises:
        ConfigError: it names none, or one that cannot be built.
    """
    model_type = values.get("model_type")
    if model_type is None:
        raise ConfigError(
            'it has no model_type; if this is a Llama\'s config.json, add "model_type": "llama"'
        )
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model_type is {model_type!r}; only {', '.join(map(repr, FAMILIES))} can be built"
        )
    return FAMILIES[model_type]


def typed(key: str, value: Any, default: Any) -> Any:
    """The value of a key, which must have the type of the default; None becomes the default.

    Raises:
        ConfigError: it has another type.
    """
    if value is None:
        return default
    if isinstance(default, bool):
        fits, required = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        fits, required = isinstance(value, int | float), "a number"
    else:
        fits, required = isinstance(value, int), "an integer"
    if not fits or isinstance(value, bool) != isinstance(default, bool):
        raise ConfigError(f"{key} must be {required}, not {json.dumps(value)}")
    return float(value) if isinstance(default, float) else value


# The keys that tell families apart, read and written.

FULL, SLIDING = "full_attention", "sliding_attention"

WINDOW = 4096
"""transformers' default of `sliding_window`, where a family has one."""

_OWN = (
    *("hidden_act", "norm_offset", "post_norms", "scale_embeddings"),
    *("attention_sinks", "swiglu_limit"),
    *("scoring_func", "n_group", "topk_group", *_DEEPSEEK[:-2]),
)
_FIELDS = {field.name: field for field in dataclasses.fields(LlamaConfig)}


def read_parts(values: Mapping[str, Any], family: Family, layers: int) -> dict[str, Any]:
    """The fields of `LlamaConfig` that tell families apart.

    Args:
        values: the content of a `config.json`.

    Raises:
        ConfigError: a key has a value that is not one of its own, or windows are not in the last
            layers.
    """
    windows = _read_window(values, family, layers)
    bias = family.attention_bias
    if bias is None:
        bias = "qkvo" if typed("attention_bias", values.get("attention_bias"), False) else "none"
    experts: dict[str, Any] = {}
    for field, keys in family.fields:
        given = {key: values[key] for key in keys if values.get(key) is not None}
        default = family.defaults.get(keys[0])
        if len(set(given.values())) > 1:
            raise ConfigError(f"{' and '.join(given)} disagree; remove one of them")
        for key, value in given.items():
            typed(key, value, default)
        experts[field] = next(iter(given.values()), default)
        if field == "q_lora_rank" and field in values:  # null is a value of its own
            experts[field] = values[field]
    return {
        "model_type": values["model_type"],
        "attention_bias": bias,
        "qk_norm": family.qk_norm,
        **windows,
        **dict(family.parts),
        **experts,
    }


def _read_window(values: Mapping[str, Any], family: Family, layers: int) -> dict[str, Any]:
    """The window, and which layers have it."""
    default = family.defaults.get("sliding_window", WINDOW)
    window = values.get("sliding_window", default) if family.window else None
    if window is not None and (type(window) is not int or window < 1):
        raise ConfigError(f"sliding_window must be a positive integer, not {json.dumps(window)}")
    switch = "use_sliding_window"
    if switch in family.window and not typed(switch, values.get(switch), False):
        window = None
    if "layer_types" not in family.window:
        return {"sliding_window": window, "max_window_layers": 0}
    types = values.get("layer_types")
    if "sliding_window_pattern" in family.window:
        given = (values.get(key) for key in PATTERN[1:3])
        default = family.defaults["sliding_window_pattern"]
        pattern = typed(PATTERN[1], next((x for x in given if x is not None), None), default)
        if types is not None:
            pattern = [*types, FULL].index(FULL) + 1
        wanted = layer_types(layers, pattern)
        if types not in (None, wanted):
            raise ConfigError(
                f"layer_types has to be {FULL} for every so many layers and {SLIDING} for the "
                f"others, {json.dumps(wanted)} for instance, not {json.dumps(types)}"
            )
        return {"sliding_window": window, "sliding_window_pattern": pattern}
    if types is None:
        first = values.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise ConfigError(f"max_window_layers must be an integer, not {json.dumps(first)}")
    else:
        first = list(types).count(FULL)
        if list(types) != [FULL] * first + [SLIDING] * (layers - first):
            raise ConfigError(
                f"layer_types has to be {FULL} for some of {layers} layers, then {SLIDING} for the "
                f"others, not {json.dumps(types)}"
            )
        if window is None and first < layers:
            raise ConfigError(f"layer_types has {SLIDING}, and use_sliding_window is not true")
    has_window = window is not None and first < layers
    window, first = (window, first) if has_window else (None, 0)
    return {"sliding_window": window, "max_window_layers": first}


def layer_types(layers: int, pattern: int) -> list[str]:
    """What transformers calls each layer's attention, where every `pattern`-th has no window."""
    return [FULL if number % pattern == 0 else SLIDING for number in range(1, layers + 1)]


def write_parts(config: LlamaConfig) -> dict[str, Any]:
    """The keys of a `config.json` that tell families apart.

    Raises:
        ConfigError: the family's models have not what this one has.
    """
    family = FAMILIES[config.model_type]
    has_window = config.sliding_window is not None
    layered: dict[str, Any] = {
        "use_sliding_window": has_window,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.max_window_layers if has_window else config.num_hidden_layers,
        "sliding_window_pattern": config.sliding_window_pattern,
    }
    if config.sliding_window_pattern:
        layered["layer_types"] = layer_types(
            config.num_hidden_layers, config.sliding_window_pattern
        )
    keys = {
        "model_type": config.model_type,
        "architectures": [family.architecture],
        **{keys[0]: getattr(config, field) for field, keys in family.fields},
        **{key: supported[0] for key, supported in family.fixed},
        **{key: value for key, value in layered.items() if key in family.window},
        "attention_bias": config.attention_bias == "qkvo",
    }
    if family.attention_bias == "qkv":
        del keys["attention_bias"]
    if "moe_intermediate_size" in keys:
        keys["moe_intermediate_size"] = config.expert_width
    read = read_parts(keys, family, config.num_hidden_layers)
    wrong = [
        f"{name} {getattr(config, name)!r}"
        for name in ("attention_bias", "qk_norm", "num_experts", "norm_topk_prob", *_OWN)
        if read.get(name, _FIELDS[name].default) != getattr(config, name)
    ]
    as_read = dataclasses.replace(config, **{"moe_intermediate_size": None, **read})
    if as_read.expert_width != config.expert_width:
        wrong.append(f"moe_intermediate_size {config.moe_intermediate_size}")
    if as_read.window_spans != config.window_spans:
        wrong.append(f"a window of {config.sliding_window} from layer {config.max_window_layers}")
    if wrong:
        raise ConfigError(f"transformers has no {config.model_type} with {', '.join(wrong)}")
    return keys
