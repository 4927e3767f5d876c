import jax
import jax.numpy as jnp
import numpy as np
from tiny_pair import TARGET, VOCAB, inputs, target_params

from specdec_jax import layouts
from specdec_jax.decoding import autoregressive_decode
from specdec_jax.sampling import make_sampling


def test_weights_move_and_say_the_same():
    params = jax.tree.map(jnp.array, target_params())  # the given ones are gone afterwards
    sampling, seeds = make_sampling(2, temperature=0.0), jnp.arange(2)

    def run(params, x):
        return autoregressive_decode(TARGET, params, x, max_length=8, sampling=sampling, seeds=seeds, eos_ids=())

    before = run(params, inputs(2))
    laid = layouts.settle(run, params, inputs(2))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), laid, target_params())
    np.testing.assert_array_equal(run(laid, inputs(2)).tokens, before.tokens)
    assert before.tokens.max() < VOCAB


def test_a_program_takes_weights_as_they_lie():
    turned = jax.device_put(
        jnp.arange(6.0).reshape(2, 3),
        layouts.Format(layouts.Layout(major_to_minor=(1, 0)), tiny_sharding()),
    )
    compiled = jax.jit(lambda x: x @ x.T).lower(turned).compile()
    assert compiled.input_formats[0][0].layout.major_to_minor == (1, 0)


def tiny_sharding():
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])
