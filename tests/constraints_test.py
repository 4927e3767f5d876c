import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import constraints
from specdec_jax.sampling import End, PointMass, constrain, make_sampling, standardize

BATCH, K, VOCAB, CAPACITY = 3, 4, 7, 12


def random_case(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(BATCH, K, VOCAB)).astype(np.float32)
    tokens = rng.integers(0, 4, (BATCH, CAPACITY)).astype(np.int32)  # few ids, so that they come again
    positions = rng.integers(0, CAPACITY - K, BATCH).astype(np.int32)
    return logits, tokens, positions


def each_query(positions, tokens):
    """Row, query and the history that it sees."""
    for b in range(BATCH):
        for i in range(K):
            yield b, i, tokens[b, : positions[b] + i + 1].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_repetition_penalty(seed):
    logits, tokens, positions = random_case(seed)
    penalty = np.array([1.0, 1.5, 0.7], np.float32)
    expected = logits.copy()
    for b, i, history in each_query(positions, tokens):
        for token in set(history):
            expected[b, i, token] *= penalty[b] if logits[b, i, token] < 0 else 1 / penalty[b]
    result = jax.jit(constraints.penalize_repetition)(logits, tokens, positions, penalty)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (0, 2, 5), (4, 3, 12), (2, 2, 2)])
@pytest.mark.parametrize("seed", range(5))
def test_no_repeat_ngram(seed, sizes):
    logits, tokens, positions = random_case(seed)
    expected = logits.copy()
    for b, i, history in each_query(positions, tokens):
        n = sizes[b]
        seen = {tuple(history[j : j + n]) for j in range(len(history) - n + 1)} if n else set()
        for token in range(VOCAB):
            if n and len(history) >= n - 1 and (*history[len(history) - n + 1 :], token) in seen:
                expected[b, i, token] = -np.inf
    result = jax.jit(constraints.ban_repeated_ngrams)(logits, tokens, positions, np.asarray(sizes, np.int32))
    np.testing.assert_array_equal(result, expected)


def test_forbid_and_forbid_before():
    logits, _, positions = random_case(0)
    result = np.asarray(constraints.forbid(jnp.asarray(logits), jnp.asarray([2, 5])))
    assert (result[..., [2, 5]] == -np.inf).all()
    keep = [0, 1, 3, 4, 6]
    np.testing.assert_array_equal(result[..., keep], logits[..., keep])
    # Query i is about slot positions + 1 + i: impossible in slots before `first`, untouched from there on.
    first = positions + np.array([0, 2, 9], np.int32)
    result = constraints.forbid_before(
        jnp.asarray(logits), jnp.asarray([6]), jnp.asarray(positions), jnp.asarray(first)
    )
    np.testing.assert_array_equal(
        np.asarray(result)[..., 6] == -np.inf, [[False] * 4, [True, False, False, False], [True] * 4]
    )


def run(logits, tokens, positions, **settings):
    sampling = make_sampling(BATCH, **settings)
    sampling = sampling._replace(end=End(jnp.asarray([1]), jnp.zeros(BATCH, jnp.int32)))
    return jax.jit(standardize)(logits, sampling, tokens, positions)


def test_rules_come_before_temperature_and_filters():
    # The likeliest id is forbidden; top_k 1 then keeps the next one, and greedy takes it.
    logits = np.tile(np.array([3.0, 1.0, 2.0, 0.0], np.float32), (BATCH, 1, 1))
    tokens, positions = np.zeros((BATCH, 4), np.int32), np.zeros(BATCH, np.int32)
    p = run(logits, tokens, positions, temperature=1.0, top_k=1, forbidden_ids=(0,))
    np.testing.assert_allclose(p[0, 0], [0, 0, 1, 0])
    greedy = run(logits, tokens, positions, temperature=0.0, forbidden_ids=(0, 2))
    assert isinstance(greedy, PointMass) and greedy.tokens.tolist() == [[1]] * BATCH
    penalized = run(logits, tokens, positions, temperature=0.0, repetition_penalty=2.0)  # 3 / 2 < 2
    assert isinstance(penalized, PointMass) and penalized.tokens.tolist() == [[2]] * BATCH


@pytest.mark.parametrize("min_p", [0.05, 0.3, 1.0])
def test_min_p_keeps_what_is_likely_beside_the_likeliest(min_p):
    logits, tokens, positions = random_case(1)
    plain = np.asarray(run(logits, tokens, positions, temperature=0.8))
    expected = np.where(plain >= min_p * plain.max(-1, keepdims=True), plain, 0)
    expected /= expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(run(logits, tokens, positions, temperature=0.8, min_p=min_p), expected, atol=1e-6)


def test_rows_have_their_own_rules():
    logits, tokens, positions = random_case(2)
    settings = {"repetition_penalty": [1.0, 2.0, 1.3], "no_repeat_ngram": [2, 0, 1], "min_length": [0, 40, 2]}
    together = run(logits, tokens, positions, **settings)
    for row in range(BATCH):
        alone = run(logits, tokens, positions, **{name: values[row] for name, values in settings.items()})
        np.testing.assert_array_equal(together[row], alone[row])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_id_left_is_nan(temperature):
    logits, tokens, positions = random_case(0)
    tokens = np.tile(np.arange(CAPACITY, dtype=np.int32) % VOCAB, (BATCH, 1))
    positions = np.array([0, CAPACITY - K, 1], np.int32)  # the second row has seen every id
    sampling = make_sampling(BATCH, temperature=temperature, no_repeat_ngram=1)
    result = np.asarray(constrain(jnp.asarray(logits), sampling, jnp.asarray(tokens), jnp.asarray(positions)))
    assert np.isnan(result[1]).all() and not np.isnan(result[[0, 2]]).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_p": 1.5}, "min_p is 1.5; it must be 0 to 1"),
        ({"min_length": -1}, "min_length is -1; it must be a whole number"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be 0.001 to 1000"),
        ({"no_repeat_ngram": 1.5}, "no_repeat_ngram is 1.5; it must be a whole number"),
        ({"forbidden_ids": (-3,)}, r"forbidden_ids is \(-3,\); it must be ids"),
        ({"forbidden_ids": (40,), "num_ids": 32}, r"forbidden_ids is \(40,\); it must be ids below 32"),
        ({"top_k": 2**32 + 1}, "top_k is 4294967297; it must be a whole number below"),
        ({"forbidden_ids": (0, 1, 2), "num_ids": 3}, "forbidden_ids holds all of the 3 ids"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        make_sampling(2, **settings)


def test_min_length_needs_to_know_where_it_counts_from():
    with pytest.raises(ValueError, match=r"Sampling\.end is None"):
        standardize(
            jnp.zeros((1, 1, 4)), make_sampling(1, min_length=2), jnp.zeros((1, 4), jnp.int32), jnp.zeros(1, int)
        )
