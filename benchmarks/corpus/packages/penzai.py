"""penzai: its Llama-like transformer, as a parameter dictionary and static parts."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common as llama

from benchmarks.corpus.packages.program import Size, cross_entropy, integers
from benchmarks.corpus.program import Made


def of_model(model: Any, loss: Callable[..., Any], *batch: Any) -> Made:
    """A step of a model's parameters; what else it holds is an argument, too."""
    rest, parameters = pz.unbind_params(model, freeze=True)
    optimizer = optax.adamw(1e-3, eps=1e-3)

    def step(parameters: Any, state: Any, rest: Any, *batch: Any) -> Any:
        def of_parameters(parameters: Any) -> Any:
            return loss(pz.bind_variables(rest, parameters), *batch)

        value, grads = jax.value_and_grad(of_parameters)(parameters)
        updates, state = optimizer.update(grads, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    args = (parameters, optimizer.init(parameters), rest, *batch)
    return Made(step, args, ("params", "open", "open", *["batch"] * len(batch)))


def llamalike_stacked(size: Size) -> Made:
    """A decoder with grouped-query attention, its layers scanned by pz.nn.LayerStack."""
    vocab, width, layers, batch, length = size((64, 32, 2, 8, 8), (32000, 2048, 2, 32, 512))
    heads = max(width // 128, 4)
    config = llama.LlamalikeTransformerConfig(
        num_kv_heads=heads // 2,
        query_head_multiplier=2,
        embedding_dim=width,
        projection_dim=width // heads,
        mlp_hidden_dim=3 * width,
        num_decoder_blocks=layers,
        vocab_size=vocab,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        use_layer_stack=True,
    )
    model = llama.build_llamalike_transformer(config, jax.random.key(0))
    tokens = integers(0, vocab, batch, length + 1)

    def loss(model: Any, tokens: Any) -> Any:
        named = pz.nx.wrap(tokens[:, :-1]).tag("batch", "seq")
        positions = pz.nx.arange("seq", length)
        logits = model(named, token_positions=positions)
        return cross_entropy(logits.unwrap("batch", "seq", "vocabulary"), tokens[:, 1:])

    return of_model(model, loss, tokens)


PROGRAMS = (llamalike_stacked,)
