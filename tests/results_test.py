import jax.numpy as jnp
import numpy as np

from specdec_jax.results import empty_result


def test_alpha_and_its_standard_error_are_those_of_the_betas():
    betas = [np.array([0.9, 0.5, 0.1, 0.7, 0.7], np.float32), np.array([0.25], np.float32), np.array([], np.float32)]
    result = empty_result(3, max_length=4, gamma=2, exact=jnp.asarray(True))._replace(
        trials=jnp.asarray([len(row) for row in betas], jnp.int32),
        beta_sum=jnp.asarray([row.sum() for row in betas], jnp.float32),
        beta_square_sum=jnp.asarray([(row**2).sum() for row in betas], jnp.float32),
    )
    np.testing.assert_allclose(result.alpha, [betas[0].mean(), 0.25, 0], rtol=1e-6)
    np.testing.assert_allclose(result.alpha_error, [betas[0].std() / np.sqrt(5), 0, 0], rtol=1e-5, atol=1e-4)
