"""Where rows end: at EOS anywhere in a block, at the limit, at NaN; and arguments that are out of range."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny_pair import TARGET, VOCAB, Wrapped, consistent, inputs, plain, same_tokens, speculative, target_params

from specdec_jax import verification
from specdec_jax.decoding import speculative_decode
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.results import FinishReason
from specdec_jax.sampling import make_sampling
from specdec_jax.types import Inputs


@pytest.mark.parametrize("place", range(6))
def test_eos_at_every_place_of_a_block(place):
    free = plain(1, eos_ids=(), max_length=12)
    tokens = np.asarray(free.tokens)[0]
    eos = int(tokens[place])
    first = int(np.argmax(tokens == eos))
    result = speculative(1, gamma=5, drafter="same", eos_ids=(eos,), max_length=12)
    assert int(result.lengths[0]) == first + 1
    np.testing.assert_array_equal(result.tokens[0, : first + 1], tokens[: first + 1])
    assert int(result.finish_reason[0]) == FinishReason.EOS
    consistent(result)
    same_tokens(result, plain(1, eos_ids=(eos,), max_length=12))


def test_several_eos_ids():
    free = np.asarray(plain(1, eos_ids=()).tokens)[0]
    ids = (int(free[7]), int(free[4]))
    expected = 1 + min(int(np.argmax(free == i)) for i in ids)
    assert int(speculative(1, gamma=3, eos_ids=ids).lengths[0]) == expected


@pytest.mark.parametrize(
    ("max_length", "drafter"),
    [(1, "same"), (2, "same"), (4, "same"), (5, "same"), (6, "same"), (1, "wrong"), (5, "wrong")],
)
def test_never_longer_than_max_length(max_length, drafter):
    gamma = 4  # max_length 1, 2, gamma, gamma + 1, gamma + 2
    result = speculative(2, gamma=gamma, drafter=drafter, max_length=max_length, eos_ids=())
    assert result.tokens.shape == (2, max_length)
    same_tokens(result, plain(2, max_length=max_length, eos_ids=()))
    assert result.finish_reason.tolist() == [FinishReason.LENGTH] * 2
    consistent(result)


@pytest.mark.parametrize("drafter", ["near", "wrong"])
def test_rows_with_limits_of_their_own(drafter):
    limits = np.array([0, 1, 4, 7, 12, 99])
    asked = {"max_length": 12, "eos_ids": (), "temperature": 1.0}
    free = speculative(6, gamma=3, drafter=drafter, **asked)
    result = speculative(6, gamma=3, drafter=drafter, limits=jnp.asarray(limits, jnp.int32), **asked)
    expected = np.minimum(limits, 12)
    np.testing.assert_array_equal(result.lengths, expected)
    inside = np.arange(12)[None] < expected[:, None]
    np.testing.assert_array_equal(result.tokens, np.where(inside, free.tokens, 0))
    assert result.finish_reason.tolist() == [FinishReason.LENGTH] * 6
    consistent(result)


def test_limits_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"limits is int32 of shape \(3,\) and seeds has shape \(2,\)"):
        speculative(2, gamma=3, limits=jnp.ones((3,), jnp.int32))


def test_eos_just_before_the_limit_is_the_reason():
    free = np.asarray(plain(1, eos_ids=(), max_length=12).tokens)[0]
    fresh = next(i for i in range(3, 12) if free[i] not in free[:i])
    result = speculative(1, gamma=5, drafter="same", eos_ids=(int(free[fresh]),), max_length=fresh + 2)
    assert int(result.finish_reason[0]) == FinishReason.EOS and int(result.lengths[0]) == fresh + 1


@dataclasses.dataclass(frozen=True)
class NaNModel(Wrapped):
    """A target whose logits are NaN from a position on, in the row whose input starts with 13."""

    position: int

    def prefill(self, params, inputs, cache_length):
        cache, prompt, positions = self.inner.prefill(params, inputs, cache_length)
        return (cache, inputs.encoder_tokens[:, 0] == 13), prompt, positions

    def extend(self, params, cache, tokens, positions):
        cache, bad = cache
        logits, cache = self.inner.extend(params, cache, tokens, positions)
        late = positions[:, None] + jnp.arange(tokens.shape[1])[None] >= self.position
        return jnp.where((bad[:, None] & late)[..., None], jnp.nan, logits), (cache, bad)


@pytest.mark.parametrize("rule", [verification.token, verification.block, verification.coupled])
def test_nan_behind_guesses_of_another_model(rule):
    """What is emitted before the NaN does not depend on it."""
    x = Inputs(jnp.asarray([[13, 2, 3], [4, 5, 6]]))
    args = {"max_length": 12, "sampling": make_sampling(2), "seeds": jnp.arange(2), "eos_ids": (), "rule": rule}
    tree = tiny.nudged(target_params(), 0.1)
    good, result = (
        speculative_decode(target, target_params(), ModelDrafter(TARGET), tree, x, gamma=3, **args)
        for target in (TARGET, NaNModel(TARGET, 5))
    )
    assert result.finish_reason.tolist() == [FinishReason.NAN, FinishReason.LENGTH] and int(result.lengths[0]) == 5
    np.testing.assert_array_equal(result.tokens[1], good.tokens[1])
    assert np.isfinite(result.scores).all() and (np.asarray(result.standardized_scores) > -1e9).all()
    consistent(result)


def test_an_id_that_no_rule_leaves_ends_the_row():
    """On a guessed path too: each id only once, and more tokens wanted than there are ids."""
    kwargs = {"gamma": 4, "temperature": 1.0, "no_repeat_ngram": 1, "max_length": VOCAB + 5, "eos_ids": ()}
    result = speculative(3, drafter="scripted", **kwargs)
    assert result.finish_reason.tolist() == [FinishReason.NAN] * 3
    for row, length in zip(np.asarray(result.tokens), result.lengths.tolist(), strict=True):
        assert length == VOCAB - 1 and len({0, *row[:length].tolist()}) == VOCAB  # the start token is in the history


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("where", ["target", "draft"])
def test_nan_logits_end_the_row_or_only_its_guesses(where, temperature):
    x = Inputs(jnp.asarray([[13, 2, 3], [4, 5, 6]]))
    broken = NaNModel(TARGET, 5)
    args = {
        "max_length": 12,
        "sampling": make_sampling(2, temperature=temperature),
        "seeds": jnp.arange(2),
        "eos_ids": (),
    }

    def run(target, draft):
        return speculative_decode(target, target_params(), ModelDrafter(draft), target_params(), x, gamma=3, **args)

    good = run(TARGET, TARGET)
    result = run(broken, TARGET) if where == "target" else run(TARGET, broken)
    np.testing.assert_array_equal(result.tokens[1], good.tokens[1])  # the other row does not notice
    assert int(result.finish_reason[1]) == FinishReason.LENGTH
    if where == "target":
        assert int(result.finish_reason[0]) == FinishReason.NAN and int(result.lengths[0]) == 5
        np.testing.assert_array_equal(result.tokens[0, :5], good.tokens[0, :5])
    else:
        assert int(result.finish_reason[0]) == FinishReason.LENGTH and int(result.lengths[0]) == 12
        assert ((np.asarray(result.tokens) >= 0) & (np.asarray(result.tokens) < VOCAB)).all()
    consistent(result)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 0}, "gamma is 0; it must be 1 or more"),
        ({"gamma": 5000}, "gamma is 5000"),
        ({"max_length": 0}, "max_length is 0"),
        ({"eos_ids": (-1,)}, r"eos_ids is \(-1,\)"),
        ({"lenience": 0.0}, "lenience is 0.0"),
        ({"lenience": 2.0}, "lenience is 2.0"),
        ({"sampling": make_sampling(3, temperature=1.0)}, "sampling is for 3 rows and inputs has 2"),
        ({"seeds": jnp.arange(3, dtype=jnp.int32)}, "seeds has 3 rows and inputs 2"),
    ],
)
def test_arguments_out_of_range(change, message):
    args = {
        "gamma": 2,
        "max_length": 5,
        "sampling": make_sampling(2, temperature=0.0),
        "seeds": jnp.arange(2, dtype=jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        speculative_decode(
            TARGET, target_params(), ModelDrafter(TARGET), target_params(), inputs(2), **{**args, **change}
        )


def test_vocabularies_that_differ_are_refused():
    other = tiny.model(vocab=VOCAB + 1)
    with pytest.raises(ValueError, match="vocabulary of 21 ids and the target one of 20"):
        speculative_decode(
            TARGET,
            target_params(),
            ModelDrafter(other),
            tiny.params(other),
            inputs(2),
            gamma=2,
            max_length=5,
            sampling=make_sampling(2, temperature=0.0),
            seeds=jnp.arange(2, dtype=jnp.int32),
        )
