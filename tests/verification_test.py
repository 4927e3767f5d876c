import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import verification
from specdec_jax.sampling import PointMass, StepKeys
from specdec_jax.verification import Proposal, Target


def random_law(rng, vocab):
    p = rng.dirichlet(np.ones(vocab)) * (rng.random(vocab) < 0.7)
    if p.sum() == 0:
        p[rng.integers(vocab)] = 1
    return p / p.sum()


def pairs():
    """Random p, q with zeros; equal; one ulp apart; disjoint."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        yield random_law(rng, 5), random_law(rng, 5)
    p = random_law(rng, 5)
    yield p, p
    yield p, np.nextafter(p, 1)
    yield np.nextafter(p, 1), p
    yield np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.25, 0.75])


def test_one_step_has_the_target_law(float64):
    one = jnp.float64(1)
    for p, q in pairs():
        p, q = jnp.asarray(p), jnp.asarray(q)
        accept = verification.accept_probability(p, q, one)
        assert accept.dtype == jnp.float64
        accepted = q * accept
        law = accepted + (q.sum() - accepted.sum()) * verification.residual(p, q)
        np.testing.assert_allclose(law, p, atol=1e-14)
        proposal = Proposal(jnp.zeros((1, 1), jnp.int32), q[None, None], jnp.ones((1,), jnp.int32))
        target = Target(jnp.stack([p, p])[None], jnp.zeros((1, 2, len(p))), jnp.zeros(1, bool))
        beta = verification.beta(target, proposal, one)
        np.testing.assert_allclose(accepted.sum(), beta[0, 0], atol=1e-14)  # Theorem 3.5
        np.testing.assert_allclose(beta[0, 0], 1 - np.abs(p - q).sum() / 2, atol=1e-14)  # Lemma 3.3


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
def test_accepts_has_the_probability_it_says(lenience):
    r = (np.arange(1000) + 0.5) / 1000
    for p, q in [(0.2, 0.8), (0.8, 0.2), (0.0, 0.5), (0.5, 0.0), (0.3, 0.3), (0.04, 0.9)]:
        passed = verification.accepts(jnp.asarray(r), jnp.full(1000, p), jnp.full(1000, q), jnp.float32(lenience))
        expected = verification.accept_probability(jnp.float32(p), jnp.float32(q), jnp.float32(lenience))
        assert abs(float(np.mean(passed)) - float(expected)) < 2e-3


def test_probability_zero_never_passes_even_at_r_zero():
    zero = jnp.zeros(1)
    assert not bool(verification.accepts(zero, zero, jnp.ones(1), jnp.float32(1))[0])
    assert not bool(verification.accepts(zero, zero, jnp.ones(1), jnp.float32(1e-3))[0])
    assert bool(verification.accepts(zero, jnp.full(1, 1e-30), jnp.ones(1), jnp.float32(1))[0])


def test_lenience_bounds_what_is_gained(float64):
    # No token's probability grows beyond p / lenience (A.5), and alpha is sum min(p / l, q).
    for p, q in pairs():
        for lenience in (0.5, 0.1):
            accept = verification.accept_probability(jnp.asarray(p), jnp.asarray(q), jnp.float64(lenience))
            law = q * accept + (q.sum() - (q * accept).sum()) * verification.residual(jnp.asarray(p), jnp.asarray(q))
            assert (np.asarray(law) <= np.asarray(p) / lenience + 1e-12).all()
            np.testing.assert_allclose((q * accept).sum(), np.minimum(p / lenience, q).sum(), atol=1e-14)
            target = Target(jnp.asarray(np.stack([p, p]))[None], jnp.zeros((1, 2, len(p))), jnp.zeros(1, bool))
            proposal = Proposal(jnp.zeros((1, 1), jnp.int32), jnp.asarray(q)[None, None], jnp.ones(1, jnp.int32))
            alpha = verification.beta(target, proposal, jnp.float64(lenience))
            np.testing.assert_allclose(alpha[0, 0], np.minimum(p / lenience, q).sum(), atol=1e-14)


def test_residual_of_equal_laws_is_p():
    p = jnp.asarray([0.25, 0.75])
    np.testing.assert_array_equal(verification.residual(p, p), p)
    above = jnp.nextafter(p, jnp.float32(2))
    assert np.isfinite(verification.residual(p, above)).all()


def test_residual_by_hand():
    r = verification.residual(jnp.asarray([0.5, 0.3, 0.2]), jnp.asarray([0.1, 0.6, 0.3]))
    np.testing.assert_allclose(r, [1, 0, 0], atol=1e-7)


def test_count_accepted_stops_at_the_first_failure_and_at_num_guesses():
    passed = jnp.asarray([[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]], bool)
    n = verification.count_accepted(passed, jnp.asarray([3, 3, 3, 2, 0]))
    assert n.tolist() == [3, 1, 0, 2, 0]


def keys(batch):
    rngs = jax.vmap(jax.random.key)(jnp.arange(batch))
    return StepKeys(rngs, jnp.zeros((batch,), jnp.int32))


def test_the_beta_of_point_mass_guesses_is_that_of_their_one_hot_q():
    batch, vocab = 500, 4
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.dirichlet(np.ones(vocab), (batch, 3)), jnp.float32)
    guesses = jnp.asarray(rng.integers(vocab, size=(batch, 2)), jnp.int32)
    num = jnp.full((batch,), 2, jnp.int32)
    target = Target(p, jnp.log(p), jnp.zeros(batch, bool))
    dense = Proposal(guesses, jax.nn.one_hot(guesses, vocab), num)
    betas = [verification.beta(target, x, jnp.float32(1)) for x in (Proposal(guesses, None, num), dense)]
    np.testing.assert_allclose(*betas, atol=1e-7)


def test_nothing_proposed_draws_from_p():
    p = jnp.tile(jnp.asarray([0.0, 0.0, 1.0]), (4, 1, 1))
    proposal = Proposal(jnp.zeros((4, 0), jnp.int32), None, jnp.zeros((4,), jnp.int32))
    n, extra = verification.token(keys(4), Target(p, p, jnp.zeros(4, bool)), proposal, jnp.float32(1))
    assert n.tolist() == [0] * 4 and extra.tolist() == [2] * 4


def test_beta_of_a_greedy_target():
    p = PointMass(jnp.asarray([[1, 2, 0]]))
    q = jnp.asarray([[[0.1, 0.6, 0.3], [0.5, 0.3, 0.2]]])
    num = jnp.full((1,), 2, jnp.int32)
    log_probs = jnp.log(jnp.asarray([[[0.3, 0.5, 0.2], [0.3, 0.1, 0.6], [1.0, 0.0, 0.0]]]))
    target = Target(p, log_probs, jnp.ones(1, bool))
    dense, point = Proposal(jnp.asarray([[1, 0]]), q, num), Proposal(jnp.asarray([[1, 0]]), None, num)
    np.testing.assert_allclose(verification.beta(target, dense, jnp.float32(1)), [[0.6, 0.2]])
    np.testing.assert_allclose(verification.beta(target, point, jnp.float32(1)), [[1.0, 0.0]])
    # At lenience 0.5 the first place also takes id 0 (0.3 of 0.5), and the second takes it too (0.3 of 0.6).
    one_hot = Target(jax.nn.one_hot(p.tokens, 3), log_probs, target.greedy)
    for said in (target, one_hot):
        np.testing.assert_allclose(verification.beta(said, dense, jnp.float32(0.49)), [[0.7, 0.7]], rtol=1e-6)
        np.testing.assert_allclose(verification.beta(said, point, jnp.float32(0.49)), [[1.0, 1.0]])
