"""Weights in the form that decodes fastest give the same logits, and cannot be taken for the other form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specdec_jax.models.layers import TRANSPOSED
from specdec_jax.models.t5 import T5Config
from specdec_jax.types import Inputs

MODEL = tiny.model(vocab=20, emb=16)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only a CPU has a form of its own")
def test_prepared_weights_are_transposed_and_named_so():
    plain = tiny.params(MODEL)
    prepared = MODEL.prepare(plain)
    kernel = plain["decoder"]["layers_0"]["mlp"]["wi_0"]["kernel"]
    np.testing.assert_array_equal(prepared["decoder"]["layers_0"]["mlp"]["wi_0"][TRANSPOSED], kernel.T)
    with pytest.raises(ValueError, match="not a T5's parameters"):
        T5Config.from_params(prepared)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_prepared_weights_give_the_same_logits(batch):
    plain = tiny.params(MODEL)
    x = Inputs(tiny.encoder_inputs(batch, vocab=20))

    @jax.jit
    def run(params):
        cache, prompt, positions = MODEL.prefill(params, x, 8)
        one, cache = MODEL.extend(params, cache, prompt, positions)
        block = jnp.tile(jnp.asarray([[4, 9, 2]]), (batch, 1))
        several, _ = MODEL.extend(params, cache, block, positions + 1)
        return one, several

    for a, b in zip(run(plain), run(MODEL.prepare(plain)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_weights_that_do_not_belong_together():
    shapes = MODEL.param_shapes()
    query = shapes["decoder"]["layers_0"]["self_attention"]["query"]
    query["kernel"] = jax.ShapeDtypeStruct((16, 9), jnp.float32)
    with pytest.raises(ValueError, match="query/kernel has 9 columns, which the 2 heads"):
        T5Config.from_params(shapes)
    with pytest.raises(ValueError, match="not a T5's parameters"):
        T5Config.from_params({"decoder": np.zeros(3)})


def test_a_cache_shorter_than_the_prefix():
    x = Inputs(tiny.encoder_inputs(1, vocab=20), prefix=jnp.asarray([[3, 4, 5]]))
    with pytest.raises(ValueError, match="cache_length is 3; a prefix of 3 tokens"):
        MODEL.prefill(tiny.params(MODEL), x, 3)
