"""Invariants of the loop: greedy equality, counts, independence of rows, roll-back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny_pair import (
    TARGET,
    VOCAB,
    Wrapped,
    consistent,
    inputs,
    plain,
    same_tokens,
    speculative,
    target_params,
)

from specdec_jax.decoding import autoregressive_decode, speculative_decode
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.sampling import PointMass, make_sampling
from specdec_jax.types import Inputs


@pytest.mark.parametrize(
    ("gamma", "batch", "drafter"),
    [
        (1, 1, "near"),
        (2, 3, "other"),
        (3, 5, "near"),
        (4, 1, "wrong"),
        (5, 2, "scripted"),
        (7, 4, "same"),
        (10, 3, "near"),
    ],
)
def test_greedy_equals_plain_decoding(gamma, batch, drafter):
    result = speculative(batch, gamma=gamma, drafter=drafter)
    same_tokens(result, plain(batch))
    consistent(result)


def test_plain_greedy_is_the_argmax_of_teacher_forcing():
    batch = 4
    result = plain(batch)
    decoder = jnp.pad(result.tokens, ((0, 0), (1, 0)))[:, :-1]
    logits = TARGET.forward(target_params(), inputs(batch).encoder_tokens, decoder)
    inside = np.arange(20)[None] < np.asarray(result.lengths)[:, None]
    np.testing.assert_array_equal(np.argmax(logits, -1)[inside], np.asarray(result.tokens)[inside])
    log_probs = jax.nn.log_softmax(logits)
    expected = jnp.take_along_axis(log_probs, result.tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(np.asarray(result.scores)[inside], np.asarray(expected)[inside], atol=1e-5)
    assert len(np.unique(result.tokens)) > 4  # or the test would show little


def test_numbers_do_not_come_from_the_default_generator():
    """t5x may switch to one whose numbers, for a batch of keys, are not those of each key alone."""
    expected = speculative(3, gamma=3, drafter="other", temperature=1.0)
    with jax.default_prng_impl("unsafe_rbg"):  # another length, or the program compiled a moment ago would serve again
        found = speculative(3, gamma=3, drafter="other", temperature=1.0, max_length=19)
    np.testing.assert_array_equal(found.tokens, expected.tokens[:, :19])


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("gamma", [1, 5])
def test_a_draft_equal_to_the_target_is_always_accepted(gamma, temperature):
    kw = {} if temperature == 0 else {"top_k": 9, "top_p": 0.95}
    result = speculative(3, gamma=gamma, drafter="same", temperature=temperature, eos_ids=(), **kw)
    assert result.num_target_calls.tolist() == [-(-20 // (gamma + 1))] * 3
    np.testing.assert_allclose(result.alpha, 1, atol=1e-5)
    consistent(result)


def test_padded_encoder_rows_do_not_hurt_acceptance():
    x = Inputs(jnp.pad(inputs(3).encoder_tokens, ((0, 0), (0, 7))))
    result = speculative(3, gamma=4, drafter="same", eos_ids=(), x=x)
    assert result.num_target_calls.tolist() == [4] * 3
    np.testing.assert_array_equal(result.tokens, plain(3, eos_ids=()).tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_alone_equals_the_row_in_a_batch(temperature):
    batch = 5
    x = inputs(batch).encoder_tokens
    together = speculative(batch, gamma=3, temperature=temperature)
    order = jnp.asarray([3, 1, 4, 0, 2])
    shuffled = speculative(batch, gamma=3, temperature=temperature, x=Inputs(x[order]), seeds=order.astype(jnp.int32))
    for place, row in enumerate(order.tolist()):
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(shuffled), strict=True):
            np.testing.assert_allclose(np.asarray(a)[row], np.asarray(b)[place], atol=2e-5)
    for row in range(batch):
        seeds = jnp.asarray([row], jnp.int32)
        alone = speculative(1, gamma=3, temperature=temperature, x=Inputs(x[row : row + 1]), seeds=seeds)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        steps = int(alone.num_target_calls[0])
        assert steps == int(together.num_target_calls[row])
        np.testing.assert_array_equal(alone.step_accepted[0], together.step_accepted[row])


def test_padding_the_encoder_input_changes_nothing():
    x = inputs(3).encoder_tokens
    wide = Inputs(jnp.pad(x, ((0, 0), (0, 9))))
    for temperature in (0.0, 1.0):
        a = speculative(3, gamma=3, temperature=temperature)
        np.testing.assert_array_equal(a.tokens, speculative(3, gamma=3, temperature=temperature, x=wide).tokens)


def test_seeds_matter_and_repeat():
    def run(seed, **kw):
        return np.asarray(speculative(2, gamma=3, temperature=1.0, seeds=jnp.asarray([seed, seed + 1]), **kw).tokens)

    np.testing.assert_array_equal(run(4), run(4))
    assert (run(4) != run(40)).any()
    same_input = Inputs(jnp.tile(inputs(1).encoder_tokens, (2, 1)))
    both = run(4, x=same_input)
    assert (both[0] != both[1]).any()


def test_greedy_ignores_seeds():
    a = speculative(2, gamma=3, seeds=jnp.asarray([1, 2]))
    np.testing.assert_array_equal(a.tokens, speculative(2, gamma=3, seeds=jnp.asarray([8, 9])).tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_start_token_other_than_padding(temperature):
    target = tiny.model(vocab=VOCAB, emb=16, start_id=7)
    args = {
        "max_length": 12,
        "sampling": make_sampling(2, temperature=temperature),
        "seeds": jnp.arange(2),
        "eos_ids": (),
    }
    result = speculative_decode(
        target, target_params(), ModelDrafter(target), target_params(), inputs(2), gamma=3, **args
    )
    assert result.num_target_calls.tolist() == [3, 3]
    if temperature == 0:
        same_tokens(result, autoregressive_decode(target, target_params(), inputs(2), **args))
        assert (np.asarray(result.tokens) != np.asarray(plain(2, max_length=12, eos_ids=()).tokens)).any()


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_a_prefix_is_gone_on_from(gamma):
    free = plain(2, max_length=12, eos_ids=())
    prefix = jnp.asarray([[*free.tokens[0, :3]], [free.tokens[1, 0], 0, 0]])  # ragged: 3 tokens and 1
    x = inputs(2)._replace(prefix=prefix)
    if gamma:
        result = speculative(2, gamma=gamma, x=x, max_length=8, eos_ids=())
    else:
        result = plain(2, x=x, max_length=8, eos_ids=())
    np.testing.assert_array_equal(result.tokens[0], free.tokens[0, 3:11])
    np.testing.assert_array_equal(result.tokens[1], free.tokens[1, 1:9])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("amount", [1e4, -1e4])
def test_what_lies_behind_the_position_is_never_read(amount, temperature):
    """Poison in the slots of rejected guesses changes nothing."""

    @dataclasses.dataclass(frozen=True)
    class Poisoned(Wrapped):
        def extend(self, params, cache, tokens, positions):
            def spoil(slots):
                stale = jnp.arange(slots.shape[2])[None] >= positions[:, None]
                return jnp.where(stale[:, None, :, None], amount, slots)

            cache = cache._replace(keys=tuple(map(spoil, cache.keys)), values=tuple(map(spoil, cache.values)))
            return self.inner.extend(params, cache, tokens, positions)

    args = {"max_length": 14, "sampling": make_sampling(3, temperature=temperature), "seeds": jnp.arange(3)}
    tree = tiny.nudged(target_params(), 0.05)
    target, drafter = Poisoned(TARGET), ModelDrafter(Poisoned(TARGET))
    result = speculative_decode(target, target_params(), drafter, tree, inputs(3), gamma=3, **args)
    clean = speculative(3, gamma=3, max_length=14, temperature=temperature)
    np.testing.assert_array_equal(result.tokens, clean.tokens)
    np.testing.assert_array_equal(result.step_accepted, clean.step_accepted)


def test_rows_that_accept_nothing_and_everything_side_by_side():
    @dataclasses.dataclass(frozen=True)
    class Half(ModelDrafter):
        def step(self, params, state, tokens, positions, *, first):
            logits, state = super().step(params, state, tokens, positions, first=first)
            sign = jnp.where(jnp.arange(tokens.shape[0]) % 2 == 0, 1.0, -1.0)
            return logits * sign[:, None], state

    args = {"max_length": 15, "sampling": make_sampling(4, temperature=0.0), "seeds": jnp.arange(4), "eos_ids": ()}
    result = speculative_decode(TARGET, target_params(), Half(TARGET), target_params(), inputs(4), gamma=4, **args)
    assert result.num_target_calls.tolist() == [3, 15, 3, 15]
    same_tokens(result, plain(4, max_length=15, eos_ids=()))
    consistent(result)


def test_a_wrong_first_guess_rejects_the_block():
    result = speculative(2, gamma=4, drafter="wrong", eos_ids=())
    assert result.accepted.tolist() == [0, 0] and result.num_target_calls.tolist() == [20, 20]
    assert result.alpha.tolist() == [0, 0]


def test_rates_are_defined_when_nothing_was_drafted():
    result = plain(2)
    assert result.drafted.tolist() == [0, 0] and result.alpha.tolist() == [0, 0]
    assert result.step_guesses.shape == (2, 20, 0)
    consistent(result)


def test_greedy_drafts_for_a_sampling_target_and_the_reverse_run():
    for target_t, draft_t in [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)]:
        temperatures = {"temperature": target_t, "draft_temperature": draft_t}
        result = speculative(2, gamma=3, drafter="same", max_length=10, **temperatures)
        consistent(result)
        if target_t == 0:
            same_tokens(result, plain(2, max_length=10))


def test_top_k_1_at_temperature_1_is_argmax():
    same = speculative(3, gamma=3, temperature=1.0, top_k=1)
    np.testing.assert_array_equal(same.tokens, speculative(3, gamma=3).tokens)


def test_point_mass_type_is_what_a_drafter_may_return():
    @dataclasses.dataclass(frozen=True)
    class Constant:
        def init(self, params, inputs, cache_length):
            return ()

        def step(self, params, state, tokens, positions, *, first):
            return PointMass(jnp.full((tokens.shape[0], 1), 3, jnp.int32)), state

    result = speculative_decode(
        TARGET,
        target_params(),
        Constant(),
        None,
        inputs(3),
        gamma=2,
        max_length=12,
        sampling=make_sampling(3, temperature=0.0),
        seeds=jnp.arange(3, dtype=jnp.int32),
    )
    same_tokens(result, plain(3, max_length=12))
