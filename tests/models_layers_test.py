"""T5's layers against the same formulas in NumPy, and its buckets against exact arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.models.layers import MASKED, Attention, Dense, Mlp, RelativeBias, RMSNorm, Segment, relative_bucket

HEADS, HEAD_DIM, EMB = 3, 4, 10  # heads * head_dim is not emb: T5's larger models differ there too


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(found, expected):
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def apply(module, params, *args, method=None):
    return module.apply({"params": params}, *jax.tree.map(jnp.asarray, args), method=method)


# --- Dense, norm, feed-forward ---


@pytest.mark.parametrize("lead", [(), (2,), (2, 5)])
def test_dense_is_a_product_without_bias(lead):
    kernel, x = draw(0, 4, 6), draw(1, *lead, 4)
    close(apply(Dense(6, jnp.float32), {"kernel": kernel}, x), x @ kernel)


def test_norm_divides_by_the_root_mean_square_and_does_not_centre():
    x, scale = 3 + draw(0, 2, EMB), draw(1, EMB)
    expected = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * scale
    close(apply(RMSNorm(jnp.float32), {"scale": scale}, x), expected)
    assert not np.asarray(apply(RMSNorm(jnp.float32), {"scale": scale}, np.zeros_like(x))).any()  # no 0/0


def test_norm_takes_its_mean_in_float32():
    # 300**2 * 4096 terms: summed with 8 bits, the small ones would vanish.
    x = np.concatenate([[300.0], np.full(4095, 1.0)]).astype(np.float32)[None]
    found = apply(RMSNorm(jnp.bfloat16), {"scale": np.ones(4096, np.float32)}, jnp.asarray(x, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    expected = jnp.asarray(x / np.sqrt((x**2).mean()), jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def test_gated_feed_forward_multiplies_gelu_by_linear():
    wi_0, wi_1, wo, x = draw(0, EMB, 7), draw(1, EMB, 7), draw(2, 7, EMB), draw(3, 2, EMB)
    params = {"wi_0": {"kernel": wi_0}, "wi_1": {"kernel": wi_1}, "wo": {"kernel": wo}}
    close(apply(Mlp(7, ("gelu", "linear"), jnp.float32), params, x), (gelu(x @ wi_0) * (x @ wi_1)) @ wo)


def test_plain_feed_forward_is_relu():
    wi, wo, x = draw(0, EMB, 7), draw(2, 7, EMB), draw(3, 2, EMB)
    params = {"wi": {"kernel": wi}, "wo": {"kernel": wo}}
    close(apply(Mlp(7, ("relu",), jnp.float32), params, x), np.maximum(x @ wi, 0) @ wo)


# --- Attention ---

ATTENTION = Attention(HEADS, HEAD_DIM, EMB, jnp.float32)
KERNELS = {name: draw(i, EMB, HEADS * HEAD_DIM) for i, name in enumerate(("query", "key", "value"))}
KERNELS["out"] = draw(3, HEADS * HEAD_DIM, EMB)
PARAMS = {name: {"kernel": kernel} for name, kernel in KERNELS.items()}


def slow_attention(x, source, bias):
    """One head after the other; joined columns are heads-major. bias is [batch, heads, queries, keys]."""
    rows = []
    for b in range(len(x)):
        heads = []
        for h in range(HEADS):
            columns = slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)
            query, key, value = (
                y @ KERNELS[name][:, columns] for name, y in (("query", x[b]), ("key", source[b]), ("value", source[b]))
            )
            weights = np.exp(query @ key.T + bias[b, h])  # without 1/sqrt(head_dim)
            heads.append(weights / weights.sum(axis=-1, keepdims=True) @ value)
        rows.append(np.concatenate(heads, axis=-1) @ KERNELS["out"])
    return np.stack(rows)


def segment(source, bias):
    return Segment(*apply(ATTENTION, PARAMS, source, method="keys_values"), jnp.asarray(bias))


X, SOURCE, BIAS = draw(4, 2, 5, EMB) / 4, draw(5, 2, 6, EMB) / 4, draw(6, 2, HEADS, 5, 6)


def test_attention_is_unscaled_and_heads_major():
    found = apply(ATTENTION, PARAMS, X, segment(SOURCE, BIAS), method="attend")
    close(found, slow_attention(X, SOURCE, BIAS))


@pytest.mark.parametrize("cut", [1, 4])
def test_segments_are_one_list_of_keys(cut):
    segments = segment(SOURCE[:, :cut], BIAS[..., :cut]), segment(SOURCE[:, cut:], BIAS[..., cut:])
    found = apply(ATTENTION, PARAMS, X, *segments, method="attend")
    close(found, slow_attention(X, SOURCE, BIAS))


def test_a_segment_without_slots_is_no_segment():
    empty = segment(SOURCE[:, :0], BIAS[..., :0])
    found = apply(ATTENTION, PARAMS, X, empty, segment(SOURCE, BIAS), method="attend")
    close(found, slow_attention(X, SOURCE, BIAS))


def test_masked_keys_have_no_weight_at_all():
    bias = np.where(np.arange(6) < 4, 0.0, MASKED).astype(np.float32)[None, None, None]
    wild = np.concatenate([SOURCE[:, :4], np.full((2, 2, EMB), 1e4, np.float32)], axis=1)
    found, tame = (apply(ATTENTION, PARAMS, X, segment(s, bias), method="attend") for s in (wild, SOURCE))
    np.testing.assert_array_equal(found, tame)
    close(found, slow_attention(X, SOURCE[:, :4], np.zeros((2, HEADS, 5, 4))))


def test_a_query_that_sees_nothing_stays_finite():
    bias = np.full((1, 1, 1, 6), MASKED, np.float32)
    assert np.isfinite(apply(ATTENTION, PARAMS, X, segment(SOURCE, bias), method="attend")).all()


# --- Relative positions ---


def exact_bucket(distance, bidirectional, num_buckets, max_distance):
    """T5's bucket of key position - query position, in whole numbers.

    The large half has bucket exact + floor((num - exact) * log(n / exact) / log(max / exact)), at most num - 1, for n
    positions back. That is at least exact + m just where n**(num-exact) * exact**m >= exact**(num-exact) * max**m.
    """
    first, back = 0, -distance
    if bidirectional:
        num_buckets //= 2
        first, back = (num_buckets if distance > 0 else 0), abs(distance)
    back = max(back, 0)
    exact = num_buckets // 2
    if back < exact:
        return first + back
    steps = num_buckets - exact
    passed = [m for m in range(steps) if back**steps * exact**m >= exact**steps * max_distance**m]
    return first + exact + max(passed)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 64), (8, 20), (64, 512)])
def test_buckets_are_the_formula_s(bidirectional, num_buckets, max_distance):
    distances = np.arange(-700, 701)
    settings = {"bidirectional": bidirectional, "num_buckets": num_buckets, "max_distance": max_distance}
    found = relative_bucket(distances, **settings)
    np.testing.assert_array_equal(found, [exact_bucket(int(d), *settings.values()) for d in distances])
    assert set(found) == set(range(num_buckets)) - ({num_buckets // 2} if bidirectional else set())


def test_buckets_by_hand():
    def bucket(*distances, bidirectional):
        return relative_bucket(
            np.asarray(distances), bidirectional=bidirectional, num_buckets=32, max_distance=128
        ).tolist()

    assert bucket(0, -1, -7, -8, -16, -128, -5000, bidirectional=True) == [0, 1, 7, 8, 10, 15, 15]
    assert bucket(1, 7, 8, 16, 128, 5000, bidirectional=True) == [17, 23, 24, 26, 31, 31]
    assert bucket(0, -1, -15, -16, -32, -112, -113, -5000, bidirectional=False) == [0, 1, 15, 16, 21, 30, 31, 31]
    assert bucket(1, 5000, bidirectional=False) == [0, 0]  # keys after the query are masked anyway


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_is_the_bucket_s_entry(bidirectional):
    table = draw(0, HEADS, 32)
    distances = np.arange(-200, 201)
    module = RelativeBias(HEADS, 32, 128, bidirectional=bidirectional)
    found = module.apply({"params": {"rel_embedding": table}}, distances)  # distances are constants, so NumPy
    expected = table[:, [exact_bucket(int(d), bidirectional, 32, 128) for d in distances]]
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == jnp.float32
