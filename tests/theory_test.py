import math

import numpy as np
import pytest

from specdec_jax import theory
from specdec_jax.harness import paper


@pytest.mark.parametrize("row", paper.TABLE1, ids=str)
def test_table_1(row):
    assert theory.speedup(row.alpha, row.gamma, 0.0) == pytest.approx(row.speed, abs=0.005)
    assert theory.operations(row.alpha, row.gamma, 0.0) == pytest.approx(row.operations, abs=0.005)


@pytest.mark.parametrize("row", paper.TABLE2, ids=str)
def test_the_expectations_of_table_4(row):
    assert theory.speedup(row.alpha, row.gamma, row.c) == pytest.approx(row.expected, abs=0.07)  # inputs are rounded


def test_the_speedups_under_lenience_at_temperature_0():
    (row,) = (row for row in paper.TABLE5 if row.temperature == 0)
    for alpha, speedup in zip(row.alphas, row.speedups, strict=True):
        found = theory.speedup(alpha, paper.LENIENT_GAMMA_GREEDY, paper.LENIENT_C)
        assert found == pytest.approx(speedup, abs=0.05)


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
