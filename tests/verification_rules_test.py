"""The rules' laws by exact enumeration in float64, the paper's expectations, and lenience."""

import math

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import random_model, sequence_law, step_law, target_law
from verification_test import keys

from specdec_jax import verification
from specdec_jax.sampling import PointMass
from specdec_jax.verification import Proposal, Target


def largest_error(law, expected):
    return max(abs(law.get(key, 0.0) - expected.get(key, 0.0)) for key in {*law, *expected})


def num_guesses_after(prefix, gamma, ragged):
    """How many guesses a step after this prefix makes: gamma, or 0 to gamma in turn."""
    return (len(prefix) * 2 + sum(prefix)) % (gamma + 1) if ragged else gamma


CASES = [
    (vocab, gamma, length)
    for vocab, gamma, length in [(2, 1, 4), (2, 2, 5), (2, 3, 5), (2, 4, 6), (3, 1, 3), (3, 2, 4), (3, 3, 4), (3, 4, 4)]
] + [(4, 1, 3), (4, 2, 3), (4, 3, 3), (4, 4, 3)]


@pytest.mark.parametrize("ragged", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize(("vocab", "gamma", "length"), CASES)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_several_steps_have_the_target_law(float64, rule, vocab, gamma, length, ragged):
    for seed in range(2):
        target, draft = random_model(seed, vocab), random_model(seed + 50, vocab)
        for point_mass in (False, True):

            def step(prefix, target=target, draft=draft, point_mass=point_mass):
                count = num_guesses_after(prefix, gamma, ragged)
                return step_law(rule, target, draft, prefix, gamma, count, point_mass=point_mass)

            law = sequence_law(step, length)
            assert largest_error(law, target_law(target, length)) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["equal", "one_ulp", "disjoint", "ties"])
def test_laws_at_the_edge(float64, rule, kind):
    def target(prefix):
        if kind == "ties":
            return np.array([0.25, 0.25, 0.25, 0.25])
        if kind == "disjoint":
            return np.array([0.5, 0.5, 0.0, 0.0])
        return np.array([0.1, 0.2, 0.3, 0.4])

    def draft(prefix):
        if kind == "ties":
            return np.array([0.5, 0.25, 0.25, 0.0])
        if kind == "disjoint":
            return np.array([0.0, 0.0, 0.25, 0.75])
        p = target(prefix)
        return np.nextafter(p, [1.0, 0.0, 1.0, 0.0]) if kind == "one_ulp" else p

    law = sequence_law(lambda prefix: step_law(rule, target, draft, prefix, 2, 2), 3)
    assert largest_error(law, target_law(target, 3)) < 1e-12


def error_with(monkeypatch, rule, name, wrong):
    """The error of a rule's law with one of its pieces replaced."""
    target, draft = random_model(0, 3), random_model(50, 3)
    with monkeypatch.context() as patch:
        patch.setattr(verification, name, wrong)
        enumeration.outcomes.clear_cache()
        law = sequence_law(lambda prefix: step_law(rule, target, draft, prefix, 2, 2), 3)
    enumeration.outcomes.clear_cache()
    return largest_error(law, target_law(target, 3))


def test_the_enumeration_finds_a_wrong_rule(float64, monkeypatch):
    def softmaxed(p, q):
        return jax.nn.softmax(jnp.maximum(p - q, 0), axis=-1)

    assert error_with(monkeypatch, "token", "residual", softmaxed) > 1e-3


def test_the_enumeration_finds_a_wrong_block_rule(float64, monkeypatch):
    right = verification.block_accept_probability

    def without_weights(weights, p, proposal):
        return right(jnp.where(jnp.arange(weights.shape[1])[None] > 0, 1.0, weights), p, proposal)

    assert error_with(monkeypatch, "block", "block_accept_probability", without_weights) > 1e-3


def test_a_place_without_a_law_ends_the_block_before_it():
    """NaN behind the second guess: the first is tested as if it were the last, so an impossible one never passes."""
    nan = jnp.full((2,), jnp.nan)
    p = jnp.stack([jnp.asarray([0.0, 1.0]), nan, nan])[None]
    q = jnp.asarray([[[1.0, 0.0], [0.5, 0.5]]])
    proposal = Proposal(jnp.asarray([[0, 0]]), q, jnp.asarray([2]))
    for rule in (verification.token, verification.block):
        n, extra = rule(keys(1), Target(p, jnp.log(p), jnp.zeros(1, bool)), proposal, jnp.float32(1))
        assert (int(n[0]), int(extra[0])) == (0, 1)


def expected_length(law):
    return sum(len(emitted) * weight for emitted, weight in law.items())


def test_block_never_accepts_less_than_token_and_sometimes_more(float64):
    gains = []
    for seed in range(30):
        vocab, gamma = 2 + seed % 3, 1 + seed % 4
        models = random_model(seed, vocab, zeros=0.2 * (seed % 2)), random_model(seed + 50, vocab, zeros=0.0)
        lengths = [expected_length(step_law(rule, *models, (), gamma, gamma)) for rule in ("token", "block")]
        gains.append(lengths[1] - lengths[0])
        if gamma == 1:
            assert abs(gains[-1]) < 1e-12  # one guess: the same rule
    assert min(gains) > -1e-12 and max(gains) > 0.01


@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
def test_tokens_per_step_of_independent_models_are_equation_1(float64, gamma):
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    alpha = np.minimum(p, q).sum()
    law = step_law("token", lambda _: p, lambda _: q, (), gamma, gamma)
    assert abs(expected_length(law) - (1 - alpha ** (gamma + 1)) / (1 - alpha)) < 1e-12


def random_block(batch, gamma, vocab, seed=0):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(vocab), (batch, gamma + 1)).astype(np.float32)
    q = rng.dirichlet(np.ones(vocab), (batch, gamma)).astype(np.float32)
    tokens = np.stack([[rng.choice(vocab, p=row / row.sum()) for row in rows] for rows in q.astype(np.float64)])
    num = rng.integers(0, gamma + 1, batch).astype(np.int32)
    proposal = Proposal(jnp.asarray(tokens, jnp.int32), jnp.asarray(q), jnp.asarray(num))
    return Target(jnp.asarray(p), jnp.log(p), jnp.zeros(batch, bool)), proposal


def test_block_by_hand_loops():
    """The formulas once more, as loops in NumPy: h of every row and guess."""
    target, proposal = random_block(50, 4, 3)
    p, q, tokens, num = (
        np.asarray(x, np.float64) for x in (target.p, proposal.q, proposal.tokens, proposal.num_guesses)
    )
    weights = verification.block_weights(
        verification.at_guesses(target.p, proposal.tokens), verification.at_guesses(proposal.q, proposal.tokens)
    )
    h = np.asarray(verification.block_accept_probability(weights, target.p, proposal))
    for b in range(50):
        weight = 1.0
        for i in range(int(num[b])):
            x = int(tokens[b, i])
            weight = min(1.0, weight * p[b, i, x] / q[b, i, x])
            if i + 1 == num[b]:
                expected = weight
            else:
                above = np.maximum(0, weight * p[b, i + 1] - q[b, i + 1]).sum()
                expected = above / (above + 1 - weight) if above + 1 - weight > 0 else 1.0
            assert abs(h[b, i] - expected) < 1e-5


def test_point_mass_guesses_equal_their_one_hot_q_under_every_rule():
    target, proposal = random_block(500, 3, 4)
    point = proposal._replace(q=None)
    dense = proposal._replace(q=jax.nn.one_hot(proposal.tokens, 4))
    for rule in (verification.token, verification.block):
        np.testing.assert_array_equal(
            rule(keys(500), target, point, jnp.float32(1)), rule(keys(500), target, dense, jnp.float32(1))
        )


@pytest.mark.parametrize("rule", [verification.token, verification.block, verification.coupled])
def test_every_rule_accepts_what_equals_a_greedy_target(rule):
    p = PointMass(jnp.asarray([[4, 5, 6], [4, 5, 6], [4, 5, 6], [4, 5, 6]]))
    proposal = Proposal(jnp.asarray([[4, 5], [4, 9], [9, 5], [4, 5]]), None, jnp.asarray([2, 2, 2, 1]))
    n, extra = rule(keys(4), Target(p, jnp.zeros((4, 3, 10)), jnp.ones(4, bool)), proposal, jnp.float32(1))
    assert n.tolist() == [2, 1, 0, 1] and extra.tolist() == [6, 5, 4, 5]


@pytest.mark.parametrize("rule", [verification.token, verification.block])
def test_a_one_hot_row_is_a_greedy_row(rule):
    """A greedy row in a batch that samples: p is one-hot, q is not."""
    _, proposal = random_block(200, 3, 4)
    best = np.random.default_rng(1).integers(0, 4, (200, 4))
    p = jnp.asarray(np.eye(4, dtype=np.float32)[best])
    n, extra = rule(keys(200), Target(p, jnp.log(p), jnp.ones(200, bool)), proposal, jnp.float32(1))
    hits = np.asarray(proposal.tokens) == best[:, :3]
    counted = np.cumprod(hits & (np.arange(3)[None] < np.asarray(proposal.num_guesses)[:, None]), axis=1).sum(1)
    np.testing.assert_array_equal(n, counted)
    np.testing.assert_array_equal(extra, best[np.arange(200), counted])


def test_coupled_draws_and_accepts_by_shared_noise():
    vocab, gamma, batch = 5, 3, 4000
    p = jnp.tile(jnp.asarray([0.1, 0.2, 0.3, 0.15, 0.25]), (batch, gamma + 1, 1))
    q = jnp.tile(jnp.asarray([0.2, 0.2, 0.2, 0.2, 0.2]), (batch, gamma, 1))
    rngs = jax.vmap(jax.random.key)(jnp.arange(batch))
    shared = verification.step_keys(verification.coupled, rngs, jnp.zeros(batch, jnp.int32), gamma, vocab)
    tokens = jnp.stack(
        [verification.draw_guess(shared, q[:, i], jnp.zeros(batch), jnp.int32(i)) for i in range(gamma)], 1
    )
    proposal = Proposal(tokens, q, jnp.full((batch,), gamma, jnp.int32))
    n, extra = verification.coupled(shared, Target(p, jnp.log(p), jnp.zeros(batch, bool)), proposal, jnp.float32(1))
    first = np.where(np.asarray(n) > 0, np.asarray(tokens)[:, 0], np.asarray(extra))
    frequency = np.bincount(first, minlength=vocab) / batch
    np.testing.assert_allclose(frequency, p[0, 0], atol=4 * 0.5 / math.sqrt(batch))
    distance = 0.5 * float(jnp.abs(p[0, 0] - q[0, 0]).sum())
    assert float(np.mean(np.asarray(n) > 0)) > (1 - distance) / (1 + distance) - 0.02
    later = verification.step_keys(verification.coupled, rngs, jnp.full(batch, 2, jnp.int32), gamma, vocab)
    np.testing.assert_array_equal(later.noise[:, :2], shared.noise[:, 2:])  # the same place, whatever the step's start


def test_only_the_coupled_rule_makes_noise():
    rngs = jax.vmap(jax.random.key)(jnp.arange(2))
    assert verification.step_keys(verification.block, rngs, jnp.zeros(2, jnp.int32), 3, 5).noise is None


def lenient_greedy(lenience, likelihoods, guess):
    """n of one guess by a greedy row, given the target's probabilities at its place; both forms of a greedy p."""
    log_probs = jnp.log(jnp.asarray([[likelihoods, likelihoods]]))
    best = jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
    proposal = Proposal(jnp.asarray([[guess]]), None, jnp.ones(1, jnp.int32))
    outcomes = []
    for p in (PointMass(best), jax.nn.one_hot(best, len(likelihoods))):
        n, _ = verification.token(keys(1), Target(p, log_probs, jnp.ones(1, bool)), proposal, jnp.float32(lenience))
        outcomes.append(int(n[0]))
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


def test_lenience_at_temperature_0_compares_with_the_likeliest():
    likelihoods = [0.5, 0.3, 0.2]
    assert [lenient_greedy(0.55, likelihoods, x) for x in range(3)] == [1, 1, 0]
    assert [lenient_greedy(0.3, likelihoods, x) for x in range(3)] == [1, 1, 1]
    assert [lenient_greedy(1.0, likelihoods, x) for x in range(3)] == [1, 0, 0]
    assert lenient_greedy(1.0, [0.4, 0.4, 0.2], 1) == 0  # a tie goes to the lowest id, and lenience 1 is exact


def test_lenience_is_for_the_token_rule():
    for rule in (verification.block, verification.coupled):
        with pytest.raises(ValueError, match=f"lenience is 0.5 and the rule is {rule.__name__}"):
            verification.check_lenience(rule, 0.5)
        verification.check_lenience(rule, 1.0)
    verification.check_lenience(verification.token, 0.5)
    assert verification.default_rule(1) is verification.block
    assert verification.default_rule(0.3) is verification.token


def test_outcomes_sum_to_1(float64):
    for rule in enumeration.OUTCOMES:
        law = step_law(rule, random_model(3, 3), random_model(4, 3), (1,), 3, 2)
        assert abs(sum(law.values()) - 1) < 1e-14 and max(map(len, law)) == 3
