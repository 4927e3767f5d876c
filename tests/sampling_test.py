import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import sampling
from specdec_jax.sampling import DRAW, EXTRA, PointMass, StepKeys, draw, make_sampling, standardize, uniforms


def reference(logits, temperature=1.0, top_k=0, top_p=1.0, num_ids=None):
    """One vector of logits, standardized by sorting, in float64."""
    logits = np.asarray(logits, np.float64).copy()
    vocab = len(logits)
    if num_ids is not None:
        logits[num_ids:] = -np.inf
    if temperature < 1e-4:
        return np.eye(vocab)[np.argmax(logits)]
    logits = logits / np.float64(np.float32(temperature))
    order = sorted(range(vocab), key=lambda i: (-logits[i], i))  # ties: the lowest id first
    if top_k:
        logits[order[top_k:]] = -np.inf
    p = np.exp(logits - logits.max())
    p /= p.sum()
    if top_p < 1:
        reached, kept = 0.0, []
        for i in order:
            kept.append(i)
            reached += p[i]
            if reached >= top_p - 1e-6:
                break
        p = np.where(np.isin(np.arange(vocab), kept), p, 0)
    return p / p.sum()


def run(logits, **settings):
    logits = jnp.asarray(logits, jnp.float32)
    batch = logits.shape[0]
    zeros = jnp.zeros((batch, 4), jnp.int32)
    return jax.jit(standardize)(logits, make_sampling(batch, **settings), zeros, jnp.zeros((batch,), jnp.int32))


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 2, 7, 40, 99])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.95, 1.0])
def test_standardize_equals_sorting(temperature, top_k, top_p):
    logits = 3 * np.random.default_rng(0).normal(size=(2, 3, 40)).astype(np.float32)
    p = run(logits, temperature=temperature, top_k=top_k, top_p=top_p, num_ids=38)
    if isinstance(p, PointMass):
        np.testing.assert_array_equal(p.tokens, np.argmax(logits[..., :38], -1))
        return
    assert p.dtype == jnp.float32
    for b in range(2):
        for i in range(3):
            expected = reference(logits[b, i], temperature, top_k, top_p, 38)
            np.testing.assert_allclose(p[b, i], expected, atol=2e-6)


def test_filters_see_temperature_first():
    # At temperature 0.5 one id holds 0.7 of the mass, at temperature 1 two are needed: the order decides.
    logits = np.log([[[0.55, 0.3, 0.15]]])
    np.testing.assert_array_equal(np.asarray(run(logits, temperature=0.5, top_p=0.7))[0, 0] > 0, [True, False, False])
    np.testing.assert_array_equal(np.asarray(run(logits, temperature=1.0, top_p=0.7))[0, 0] > 0, [True, True, False])


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.4}, {"top_k": 3, "top_p": 0.6}])
def test_ties_go_to_the_lowest_ids(settings):
    p = run(np.zeros((1, 1, 5)), temperature=1.0, **settings)
    np.testing.assert_allclose(p[0, 0], [0.5, 0.5, 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 0.1}, {"top_k": 2, "top_p": 0.3}])
def test_one_of_several_that_tie_is_kept_where_one_is_enough(settings):
    p = run(np.zeros((1, 1, 5)), temperature=1.0, **settings)
    np.testing.assert_array_equal(p[0, 0], [1, 0, 0, 0, 0])


def test_rows_have_their_own_settings():
    logits = np.random.default_rng(1).normal(size=(4, 2, 11)).astype(np.float32)
    settings = {"temperature": [0.0, 1.0, 0.3, 2.0], "top_k": [0, 3, 0, 5], "top_p": [1.0, 1.0, 0.5, 0.9]}
    p = run(logits, **settings)
    for b in range(4):
        row = {name: values[b] for name, values in settings.items()}
        for i in range(2):
            np.testing.assert_allclose(p[b, i], reference(logits[b, i], **row), atol=2e-6)


def test_all_greedy_builds_nothing_as_wide_as_the_vocabulary():
    logits = jnp.zeros((2, 3, 50))
    zeros = jnp.zeros((2, 4), jnp.int32)
    p = standardize(logits, make_sampling(2, temperature=0.0, top_k=5), zeros, jnp.zeros((2,), jnp.int32))
    assert isinstance(p, PointMass) and p.tokens.shape == (2, 3)


def test_a_tie_of_the_maximum_is_the_lowest_id_in_every_form():
    logits = np.array([[[0.0, 3.0, 3.0]]])
    assert int(run(logits, temperature=0.0).tokens[0, 0]) == 1
    both = run(np.repeat(logits, 2, 0), temperature=[0.0, 1.0], top_k=[0, 1])
    np.testing.assert_array_equal(both[:, 0], [[0, 1, 0], [0, 1, 0]])


def test_nan_stays_nan():
    logits = np.zeros((2, 1, 4))
    logits[0, 0, 2] = np.nan
    p = run(logits, temperature=[1.0, 1.0], top_k=2)
    assert np.isnan(p[0]).any() and not np.isnan(p[1]).any()


def test_changing_a_number_does_not_recompile():
    traced = []

    @jax.jit
    def count(logits, settings):
        traced.append(1)
        zeros = jnp.zeros((2, 4), jnp.int32)
        return standardize(logits, settings, zeros, jnp.zeros((2,), jnp.int32))

    for temperature, top_k, top_p in [(1.0, 5, 0.9), (0.7, 2, 0.5)]:
        count(jnp.ones((2, 1, 9)), make_sampling(2, temperature=temperature, top_k=top_k, top_p=top_p))
    assert len(traced) == 1


@pytest.mark.parametrize("vocab", [1, 5, 128, 129, 1000])
def test_draw_is_the_inverse_cdf(vocab):
    rng = np.random.default_rng(vocab)
    p = rng.random((1, vocab)) * (rng.random((1, vocab)) < 0.5)
    p[0, rng.integers(vocab)] = 0.3
    u = np.linspace(0, 1, 300, endpoint=False).astype(np.float32)
    ids = np.asarray(draw(jnp.asarray(np.repeat(p, 300, 0), jnp.float32), jnp.asarray(u)))
    running = np.cumsum(p[0]) / p.sum()
    expected = np.searchsorted(running, u, side="right")
    near = np.min(np.abs(running[None] - u[:, None]), axis=1) < 1e-5  # on a border rounding decides
    np.testing.assert_array_equal(ids[~near], expected[~near])
    assert (p[0][ids] > 0).all()


def test_draw_never_returns_probability_zero():
    # u = 0 with a leading zero, u just below 1 with trailing zeros, and a group of zeros on the border.
    p = np.zeros((4, 300), np.float32)
    p[:, 150] = 1.0
    p[2, 140], p[3, 10] = 1e-30, 0.5
    u = jnp.asarray([0.0, 1 - 2**-24, 0.0, 0.9999999], jnp.float32)
    assert np.asarray(draw(jnp.asarray(p), u)).tolist() == [150, 150, 140, 150]


def test_draw_of_nothing_is_in_range():
    p = jnp.stack([jnp.zeros(7), jnp.full(7, jnp.nan)])
    ids = np.asarray(draw(p, jnp.asarray([0.5, 0.5])))
    assert ((ids >= 0) & (ids < 128)).all()


def test_uniforms_depend_on_seed_position_index_and_purpose_alone():
    rngs = jax.vmap(jax.random.key)(jnp.asarray([7, 8, 7]))
    u = uniforms(StepKeys(rngs, jnp.asarray([3, 3, 3])), DRAW, 4)
    np.testing.assert_array_equal(u[0], u[2])  # not on the place in the batch
    others = [
        uniforms(StepKeys(rngs, jnp.asarray([4, 3, 3])), DRAW, 4)[0],
        uniforms(StepKeys(rngs, jnp.asarray([3, 3, 3])), EXTRA, 4)[0],
        u[1],
    ]
    for other in others:
        assert not np.isin(np.asarray(u[0]), np.asarray(other)).any()
    assert len(set(np.asarray(u[0]).tolist())) == 4
    np.testing.assert_array_equal(uniforms(StepKeys(rngs, jnp.asarray([3, 3, 3])), DRAW, 2), u[:, :2])


def test_uniforms_are_uniform():
    rngs = jax.vmap(jax.random.key)(jnp.arange(20_000))
    u = np.asarray(uniforms(StepKeys(rngs, jnp.zeros((20_000,), jnp.int32)), DRAW, 2))
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u[:, 0], 50, (0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 90  # chi-square, 49 degrees of freedom, p ~ 3e-4
    assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 0.03


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -3}, "top_k is -3"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be a whole number"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"num_ids": 0}, "num_ids is 0"),
        ({"temperature": [1.0, 1.0, 1.0]}, r"temperature has shape \(3,\)"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        make_sampling(2, **settings)


def test_filters_that_do_nothing_are_absent():
    neutral = make_sampling(2, temperature=1.0, top_k=0, top_p=1.0)
    assert neutral.top_k is None and neutral.top_p is None and neutral.num_ids is None
    assert make_sampling(2, temperature=[0.0, 1e-5], top_k=3) == sampling.Sampling()
