"""T5: one decoder path that gives the same logits however it is fed, and settings that are checked."""

import dataclasses
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.models.t5 import T5, T5Cache, T5Config
from specdec_jax.types import Inputs

TINY = dict(vocab_size=40, emb_dim=16, num_heads=3, head_dim=4, mlp_dim=24, num_encoder_layers=2, num_decoder_layers=2)
VARIANTS = {
    "t5_1_1": {},
    "t5_1_0": {"mlp_activations": ("relu",), "logits_via_embedding": True},
    "relpos_per_layer": {"relpos_per_layer": True},
}
LENGTH = 150  # decoder positions: beyond 128 all distances share a bucket
CAPACITY = LENGTH + 6
ENCODER_LENGTHS = (7, 2, 9)

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles in half the time
forward = jit(lambda model, *args: model.forward(*args), static_argnums=0)
extend = jit(lambda model, *args: model.extend(*args), static_argnums=0)
prefill = jit(lambda model, params, inputs: model.prefill(params, inputs, CAPACITY), static_argnums=0)


@functools.partial(jit, static_argnums=0)
def one_by_one(model, params, cache, tokens, positions):
    """Feeds `tokens` [batch, steps] one at a time, from each row's position on; all logits and the last cache."""

    def step(carry, token):
        cache, position = carry
        logits, cache = model.extend(params, cache, token[:, None], position)
        return (cache, position + 1), logits[:, 0]

    (cache, _), logits = jax.lax.scan(step, (cache, positions), tokens.T)
    return logits.swapaxes(0, 1), cache


class Case(NamedTuple):
    model: T5
    params: dict
    encoder_tokens: jax.Array
    tokens: jax.Array
    logits: np.ndarray  # teacher-forced, of all tokens


def random_tokens(seed, *shape):
    return np.random.default_rng(seed).integers(3, TINY["vocab_size"], shape, dtype=np.int32)


def padded(rows, lengths):
    return jnp.asarray(np.where(np.arange(rows.shape[1]) < np.asarray(lengths)[:, None], rows, 0))


def random_params(model):
    """Parameters of the model's own names and shapes; `init` would take longer to compile than anything here."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        name = path[-1].key
        size = {"kernel": leaf.shape[0] ** -0.5, "scale": 0.2}.get(name, 1.0)
        return jnp.asarray(size * rng.standard_normal(leaf.shape) + (name == "scale"), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, model.param_shapes())


def make(**settings):
    model = T5(T5Config(**TINY, **settings))
    params = random_params(model)
    encoder_tokens = padded(random_tokens(1, 3, max(ENCODER_LENGTHS)), ENCODER_LENGTHS)
    tokens = random_tokens(2, 3, LENGTH)
    tokens[:, 0] = 0
    tokens = jnp.asarray(tokens)
    return Case(model, params, encoder_tokens, tokens, np.asarray(forward(model, params, encoder_tokens, tokens)))


@functools.cache
def case_of(name):
    return make(**VARIANTS[name])


@pytest.fixture(scope="module", params=VARIANTS)
def case(request):
    return case_of(request.param)


@pytest.fixture(scope="module")
def plain():
    return case_of("t5_1_1")


@pytest.fixture(scope="module")
def full_cache(case):
    """The case's cache once all tokens were fed one by one, with a few slots to spare, and those steps' logits."""
    cache, _, positions = prefill(case.model, case.params, Inputs(case.encoder_tokens))
    logits, cache = one_by_one(case.model, case.params, cache, case.tokens, positions)
    return cache, logits


def take(rows, positions, k):
    """rows[b, positions[b] : positions[b] + k] of every row."""
    return rows[np.arange(len(rows))[:, None], np.asarray(positions)[:, None] + np.arange(k)]


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


# --- One decoder path ---


def test_one_token_at_a_time_is_teacher_forcing(case, full_cache):
    close(full_cache[1], case.logits)


def test_blocks_with_rejected_guesses_are_teacher_forcing(case):
    # Of each block of 6, the rows keep 1, 1 to 6 and 6 tokens: every row has a position of its own in every call.
    k, steps = 6, 24
    kept = np.stack([np.ones(steps, int), 1 + np.arange(steps) % k, np.full(steps, k)], axis=1)
    wrong = random_tokens(3, steps, 3, k)
    cache, _, positions = prefill(case.model, case.params, Inputs(case.encoder_tokens))
    for n, guesses in zip(kept, wrong, strict=True):
        is_kept = np.arange(k) < n[:, None]
        block = np.where(is_kept, take(case.tokens, positions, k), guesses)
        logits, cache = extend(case.model, case.params, cache, jnp.asarray(block), positions)
        close(np.asarray(logits)[is_kept], take(case.logits, positions, k)[is_kept])
        positions = positions + jnp.asarray(n, jnp.int32)
    assert positions.tolist() == [24, 84, 144]  # the last one with all its buckets saturated


def test_one_position_may_stand_for_all_rows(plain):
    cache, _, positions = prefill(plain.model, plain.params, Inputs(plain.encoder_tokens))
    _, cache = one_by_one(plain.model, plain.params, cache, plain.tokens, positions)
    logits, _ = extend(plain.model, plain.params, cache, plain.tokens[:, 131:137], jnp.asarray([131], jnp.int32))
    close(logits, plain.logits[:, 131:137])


@pytest.mark.parametrize("poison", [1e4, -1e4])
def test_slots_from_the_position_on_are_never_read(case, full_cache, poison):
    positions = jnp.asarray([3, 60, 140], jnp.int32)
    tokens = take(case.tokens, positions, 6)

    is_spoilt = jnp.arange(CAPACITY)[None, None, :, None] >= positions[:, None, None, None]

    def spoil(slots):
        return jnp.where(is_spoilt, poison, slots)

    cache = full_cache[0]
    spoilt = cache._replace(keys=tuple(map(spoil, cache.keys)), values=tuple(map(spoil, cache.values)))
    logits, clean = extend(case.model, case.params, cache, tokens, positions)
    close(logits, take(case.logits, positions, 6))
    found, written = extend(case.model, case.params, spoilt, tokens, positions)
    np.testing.assert_array_equal(found, logits)
    # And the block is written over the poison, the slots before it untouched, whatever the row.
    for row, position in enumerate(positions):
        for ours, theirs in zip(jax.tree.leaves(written[:2]), jax.tree.leaves(clean[:2]), strict=True):
            np.testing.assert_array_equal(ours[row, :, : position + 6], theirs[row, :, : position + 6])
            assert (ours[row, :, position + 6 :] == poison).all()


def test_poison_is_harmless_in_bfloat16(plain):
    model = T5(dataclasses.replace(plain.model.config, dtype=jnp.bfloat16))
    cache, _, positions = prefill(model, plain.params, Inputs(plain.encoder_tokens))
    assert {leaf.dtype for leaf in jax.tree.leaves(cache[:4])} == {jnp.dtype(jnp.bfloat16)}
    logits, _ = extend(model, plain.params, cache, plain.tokens[:, :6], positions)
    spoilt = cache._replace(**{name: tuple(s + 1e4 for s in getattr(cache, name)) for name in ("keys", "values")})
    found, _ = extend(model, plain.params, spoilt, plain.tokens[:, :6], positions)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, logits)
    # With activations rounded to 8 bits, some logits of a random model are off by a few hundredths.
    assert np.abs(found - plain.logits[:, :6]).mean() < 5e-2


@pytest.mark.parametrize("changed", [0, 5, LENGTH - 1])
def test_a_token_changes_no_logits_before_it(case, changed):
    tokens = case.tokens.at[:, changed].set(case.tokens[:, changed] % (TINY["vocab_size"] - 3) + 3)
    assert (tokens != case.tokens).sum() == 3
    logits = np.asarray(forward(case.model, case.params, case.encoder_tokens, tokens))
    np.testing.assert_array_equal(logits[:, :changed], case.logits[:, :changed])
    assert (np.abs(logits - case.logits)[:, changed:].max(axis=-1) > 1e-6).all()


def test_encoder_padding_changes_nothing(plain):
    wider = jnp.pad(plain.encoder_tokens, ((0, 0), (0, 30)))
    close(forward(plain.model, plain.params, wider, plain.tokens), plain.logits)
    cache, _, positions = prefill(plain.model, plain.params, Inputs(wider))
    logits, _ = extend(plain.model, plain.params, cache, plain.tokens[:, :6], positions)
    close(logits, plain.logits[:, :6])


def test_a_row_alone_and_unpadded_is_the_row_in_its_padded_batch(plain):
    row, length = 1, ENCODER_LENGTHS[1]
    alone = plain.encoder_tokens[row : row + 1, :length]
    assert (alone > 0).all()
    close(forward(plain.model, plain.params, alone, plain.tokens[row : row + 1])[0], plain.logits[row])


def test_logits_via_the_embedding_are_divided_by_the_root_of_its_width():
    case = case_of("t5_1_0")
    untied = T5(dataclasses.replace(case.model.config, logits_via_embedding=False))
    kernel = case.params["token_embedder"]["embedding"].T / TINY["emb_dim"] ** 0.5
    params = case.params | {"decoder": case.params["decoder"] | {"logits_dense": {"kernel": kernel}}}
    close(forward(untied, params, case.encoder_tokens, case.tokens), case.logits)


def test_the_encoder_input_matters(plain):
    other = plain.encoder_tokens.at[:, 1].set(plain.encoder_tokens[:, 1] % (TINY["vocab_size"] - 3) + 3)
    logits = forward(plain.model, plain.params, other, plain.tokens)
    assert (np.abs(logits - plain.logits).max(axis=-1) > 1e-5).all()


def test_a_ragged_prefix_is_feeding_it_token_by_token(plain):
    lengths = [4, 0, 2]
    prefix = padded(np.asarray(plain.tokens[:, 1:5]), lengths)
    inputs = Inputs(plain.encoder_tokens, prefix)
    assert inputs.prefix_length == 4
    cache, prompt, positions = prefill(plain.model, plain.params, inputs)
    assert positions.tolist() == lengths
    assert prompt.dtype == positions.dtype == jnp.int32
    np.testing.assert_array_equal(prompt, jnp.pad(prefix, ((0, 0), (1, 0))))
    logits, _ = extend(plain.model, plain.params, cache, take(plain.tokens, positions, 6), positions)
    close(logits, take(plain.logits, positions, 6))

    cache, prompt, positions = prefill(plain.model, plain.params, Inputs(plain.encoder_tokens))
    np.testing.assert_array_equal(prompt, np.zeros((3, 1)))
    assert positions.tolist() == [0, 0, 0]
    fed, _ = one_by_one(plain.model, plain.params, cache, plain.tokens, positions)
    close(take(fed, lengths, 6), logits)


def test_the_start_token_is_the_config_s(plain):
    model = T5(dataclasses.replace(plain.model.config, start_id=7))
    prefix = padded(np.asarray(plain.tokens[:, 1:5]), [4, 0, 2])
    cache, prompt, positions = prefill(model, plain.params, Inputs(plain.encoder_tokens, prefix))
    np.testing.assert_array_equal(prompt, jnp.pad(prefix, ((0, 0), (1, 0)), constant_values=7))
    tokens = plain.tokens.at[:, 0].set(7)
    expected = forward(plain.model, plain.params, plain.encoder_tokens, tokens)  # which takes its tokens as they are
    logits, _ = extend(plain.model, plain.params, cache, take(tokens, positions, 6), positions)
    close(logits, take(expected, positions, 6))
    assert np.abs(logits - take(plain.logits, positions, 6)).max(axis=-1).min() > 1e-3

    _, prompt, positions = jax.eval_shape(lambda: model.prefill(plain.params, Inputs(plain.encoder_tokens), 8))
    assert (prompt.shape, positions.shape) == ((3, 1), (3,))


def test_cache_has_one_slot_per_position_and_the_encoder_once(plain):
    inputs = Inputs(plain.encoder_tokens)
    cache, _, _ = jax.eval_shape(lambda: plain.model.prefill(plain.params, inputs, 11))
    assert isinstance(cache, T5Cache)
    assert [leaf.shape for leaf in cache.keys + cache.values] == [(3, 3, 11, 4)] * 4
    assert [leaf.shape for leaf in cache.cross_keys + cache.cross_values] == [(3, 3, 9, 4)] * 4
    np.testing.assert_array_equal(prefill(plain.model, plain.params, inputs)[0].encoder_mask, inputs.encoder_tokens > 0)


# --- Settings ---


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_config_is_read_off_the_parameters(settings):
    config = T5Config(**TINY, **settings, relpos_num_buckets=8)
    shapes = T5(config).param_shapes()
    assert T5Config.from_params(shapes) == config
    assert T5Config.from_params(shapes, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.float32)}


def test_models_of_equal_sizes_are_equal():
    one, two = (T5(T5Config(**TINY, dtype=dtype)) for dtype in ("float32", jnp.float32))
    assert one == two
    assert hash(one) == hash(two)
    assert one != T5(T5Config(**TINY, dtype=jnp.bfloat16))
    assert one.vocab_size == TINY["vocab_size"]


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [*((field, 0) for field in TINY), ("emb_dim", -4), ("relpos_num_buckets", 0), ("start_id", -1)],
)
def test_sizes_have_to_be_positive(field, value):
    with pytest.raises(ValueError, match=rf"T5Config\.{field} is {value};") as error:
        T5Config(**(TINY | {field: value}))
    one_line(error)


@pytest.mark.parametrize("activations", [("swish", "linear"), ()])
def test_unknown_activations_are_named_with_the_known_ones(activations):
    message = f"T5Config.mlp_activations is {activations}; known activations are ['gelu', 'linear', 'relu']"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        T5Config(**TINY, mlp_activations=activations)
    one_line(error)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(3, 128), (32, 16), (256, 128)])
def test_relative_buckets_need_room(num_buckets, max_distance):
    message = rf"T5Config\.relpos_num_buckets is {num_buckets}; .* relpos_max_distance, which is {max_distance}\."
    with pytest.raises(ValueError, match=message) as error:
        T5Config(**TINY, relpos_num_buckets=num_buckets, relpos_max_distance=max_distance)
    one_line(error)


@pytest.mark.parametrize("dtype", [jnp.float16, "float16", jnp.int32])
def test_dtypes_that_t5_cannot_run_in_are_refused(dtype):
    # In float16, feed-forward outputs of the published models overflow.
    with pytest.raises(
        ValueError, match=rf"T5Config\.dtype is {jnp.dtype(dtype).name}; use bfloat16 or float32"
    ) as error:
        T5Config(**TINY, dtype=dtype)
    one_line(error)


def foreign_trees():
    tree = T5(T5Config(**TINY)).param_shapes()
    no_bias = {name: leaf for name, leaf in tree["decoder"].items() if name != "relpos_bias"}
    yield "empty", {}, "decoder"
    yield "wrapped", {"target": tree}, "decoder"
    yield "another model's", {"decoder": {"block_0": {}}}, "layers_0"
    yield "no encoder", {name: stack for name, stack in tree.items() if name != "encoder"}, "encoder"
    yield "no relative bias", tree | {"decoder": no_bias}, "relpos_bias"


@pytest.mark.parametrize(("tree", "missing"), [pytest.param(t, m, id=name) for name, t, m in foreign_trees()])
def test_foreign_parameters_are_refused(tree, missing):
    with pytest.raises(ValueError, match=rf"not a T5's parameters: '{missing}' is missing") as error:
        T5Config.from_params(tree)
    one_line(error)


def test_a_t5_needs_an_encoder_input(plain):
    with pytest.raises(ValueError, match=r"Inputs\.encoder_tokens is None") as error:
        plain.model.prefill(plain.params, Inputs(None), 8)
    one_line(error)
