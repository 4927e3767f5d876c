import math

import numpy as np
import pytest

from specdec_jax import theory

# alpha, gamma, operations, speed; c and c_hat are 0
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]
# gamma, alpha, c, Exp
TABLE_2 = [
    (7, 0.75, 0.02, 3.2),
    (7, 0.80, 0.04, 3.3),
    (7, 0.82, 0.11, 2.5),
    (7, 0.62, 0.02, 2.3),
    (5, 0.68, 0.04, 2.4),
    (3, 0.71, 0.11, 2.0),
    (5, 0.65, 0.02, 2.4),
    (5, 0.73, 0.04, 2.6),
    (3, 0.74, 0.11, 2.0),
    (5, 0.53, 0.02, 1.9),
    (3, 0.55, 0.04, 1.8),
    (3, 0.56, 0.11, 1.6),
]


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_table_1(alpha, gamma, operations, speed):
    assert theory.speedup(alpha, gamma, 0.0) == pytest.approx(speed, abs=0.005)
    assert theory.operations(alpha, gamma, 0.0) == pytest.approx(operations, abs=0.005)


@pytest.mark.parametrize(("gamma", "alpha", "c", "expected"), TABLE_2)
def test_the_expectations_of_table_2(gamma, alpha, c, expected):
    assert theory.speedup(alpha, gamma, c) == pytest.approx(expected, abs=0.07)  # the printed inputs are rounded


def test_tokens_per_step_is_the_sum_of_reaching_each_place():
    for alpha in (0.0, 0.3, 0.9, 1.0):
        for gamma in (0, 1, 5):
            assert theory.tokens_per_step(alpha, gamma) == pytest.approx(sum(alpha**i for i in range(gamma + 1)))
    assert theory.oracle_tokens_per_step(0.8) == pytest.approx(5) and math.isinf(theory.oracle_tokens_per_step(1.0))
    assert theory.tokens_per_step(0.8, 1000) == pytest.approx(theory.oracle_tokens_per_step(0.8))


def test_beta_and_divergence():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(6), (2, 10))
    np.testing.assert_allclose(theory.beta(p, q) + theory.d_lk(p, q), 1)
    np.testing.assert_allclose(theory.lenient_beta(p, q, 1.0), theory.beta(p, q))
    assert (theory.lenient_beta(p, q, 0.5) >= theory.beta(p, q)).all()
    np.testing.assert_allclose(theory.beta(p, p), 1)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("c", [0.0, 0.05, 0.3, 0.9])
def test_the_best_gamma_is_the_best_and_keeps_the_guarantee(alpha, c):
    best = theory.best_gamma(alpha, c)
    reached = theory.speedup(alpha, best, c) if best else 1.0
    assert all(theory.speedup(alpha, gamma, c) <= reached + 1e-12 for gamma in range(1, 30))
    assert reached >= theory.guaranteed_speedup(alpha, c) - 1e-12
    assert (best == 0) == (alpha <= c)  # Corollary 3.9: guessing pays exactly where alpha is above c


def test_a_dearer_verification_costs():
    assert theory.speedup(0.8, 4, 0.05, verification=1.5) == pytest.approx(theory.tokens_per_step(0.8, 4) / 1.7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.tokens_per_step(1.2, 3), "alpha is 1.2; it is a probability"),
        (lambda: theory.tokens_per_step(0.5, -1), "gamma is -1; it must be 0 or more"),
        (lambda: theory.speedup(0.5, 1, -0.1), "c and verification are -0.1 and 1.0"),
    ],
)
def test_out_of_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()
