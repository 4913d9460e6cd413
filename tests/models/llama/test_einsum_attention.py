import jax.numpy as jnp
import numpy as np

from models.llama import model


def test_attention_weights_against_numpy():
    rng = np.random.default_rng(4)
    q, k = rng.normal(size=(2, 2, 6, 3, 4)).astype(np.float32)
    scores = np.einsum("bsnd,btnd->bnst", q, k) / 2
    scores[..., np.triu_indices(6, 1)[0], np.triu_indices(6, 1)[1]] = -np.inf
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    weights = model.attention_weights(jnp.asarray(q), jnp.asarray(k))
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
