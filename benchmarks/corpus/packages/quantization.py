"""qwix and AQT: quantized training of flax's layers."""

from typing import Any

import jax
import jax.numpy as jnp
import qwix
from aqt.jax.v2 import config as aqt_config
from aqt.jax.v2.flax import aqt_flax
from flax import linen

from benchmarks.corpus.packages.program import Size, normal, training
from benchmarks.corpus.program import Made


class Mlp(linen.Module):
    width: int
    dot_general: Any = None

    @linen.compact
    def __call__(self, x: Any) -> Any:
        inject = {} if self.dot_general is None else {"dot_general_cls": self.dot_general}
        h = linen.gelu(linen.Dense(self.width, **inject)(x))
        return linen.Dense(x.shape[-1], **inject)(h)


def trained(model: Any, size: Size) -> Made:
    inner, batch = size((32, 16), (2048, 4096))
    x, y = normal(0, batch, inner), normal(1, batch, inner)

    def loss(params: Any, x: Any, y: Any) -> Any:
        out = model.apply(params, x, rngs={"params": jax.random.key(3)})
        return jnp.mean((out - y) ** 2)

    return training(loss, model.init(jax.random.key(0), x), x, y)


def aqt_fp8(size: Size) -> Made:
    """AQT's float8 products."""
    cfg = aqt_config.config_fwd_fp8()
    return trained(Mlp(size(64, 8192), lambda: aqt_flax.AqtDotGeneral(cfg)), size)


def qwix_training(size: Size) -> Made:
    """qwix.QtProvider: int8 forward and backward in linen.Dense."""
    rules = [qwix.QtRule(weight_qtype=jnp.int8, act_qtype=jnp.int8, bwd_qtype=jnp.int8)]
    return trained(qwix.quantize_model(Mlp(size(64, 8192)), qwix.QtProvider(rules)), size)


def qwix_inference(size: Size) -> Made:
    """qwix.PtqProvider: int8 weights with scales, int8 activations."""
    inner, batch = size((32, 16), (4096, 256))
    rules = [qwix.QuantizationRule(weight_qtype=jnp.int8, act_qtype=jnp.int8)]
    model = qwix.quantize_model(Mlp(size(64, 16384)), qwix.PtqProvider(rules))
    x = normal(0, batch, inner)
    return Made(model.apply, (model.init(jax.random.key(0), x), x), ("params", "batch"))


PROGRAMS = (aqt_fp8, qwix_training, qwix_inference)
