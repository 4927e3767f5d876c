"""The loop under every rule of verification: greedy equality, coupled equality, acceptance as the theory has it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny_pair import TARGET, VOCAB, consistent, inputs, plain, same_tokens, speculative, target_params

from specdec_jax import verification
from specdec_jax.decoding import autoregressive_decode, speculative_decode
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.t5 import T5
from specdec_jax.sampling import make_sampling
from specdec_jax.settings import RULES


@pytest.mark.parametrize(
    ("gamma", "batch", "drafter", "rule"),
    [(1, 2, "near", "block"), (4, 3, "scripted", "coupled"), (6, 1, "wrong", "block"), (3, 4, "other", "coupled")],
)
def test_greedy_equals_plain_decoding_under_every_rule(gamma, batch, drafter, rule):
    result = speculative(batch, gamma=gamma, drafter=drafter, rule=RULES[rule])
    same_tokens(result, plain(batch))
    consistent(result)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", ["near", "other", "wrong", "scripted", "same"])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("gamma", range(1, 11))
def test_greedy_equals_plain_decoding_on_the_whole_grid(gamma, batch, drafter, rule):
    same_tokens(speculative(batch, gamma=gamma, drafter=drafter, rule=RULES[rule]), plain(batch))


@pytest.mark.parametrize(
    ("gamma", "batch", "drafter", "settings"),
    [
        (1, 3, "near", {}),
        (4, 2, "other", {"top_k": 5}),
        (3, 4, "scripted", {"top_p": 0.8}),
        (5, 1, "wrong", {"repetition_penalty": 1.3, "min_length": 4}),
        (2, 3, "same", {"no_repeat_ngram": 2}),
    ],
)
def test_coupled_equals_plain_decoding_with_the_same_noise(gamma, batch, drafter, settings):
    kwargs = {"temperature": 1.0, "rule": verification.coupled, **settings}
    expected = plain(batch, **kwargs)
    result = speculative(batch, gamma=gamma, drafter=drafter, **kwargs)
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    np.testing.assert_array_equal(result.finish_reason, expected.finish_reason)
    consistent(result)
    if drafter == "same" and not settings.get("no_repeat_ngram"):
        assert (np.asarray(result.accepted) == np.asarray(result.drafted)).all()


@pytest.mark.parametrize("gamma", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_prefix_is_gone_on_from_with_the_same_noise(gamma):
    """Also under rules that count from where the prefix ends, or look at it."""
    kwargs = {"temperature": 1.0, "rule": verification.coupled, "no_repeat_ngram": 2, "max_length": 8}
    free = plain(2, eos_ids=(), **{**kwargs, "max_length": 12})
    prefix = jnp.asarray([[*free.tokens[0, :3]], [free.tokens[1, 0], 0, 0]])  # ragged: 3 tokens and 1
    x = inputs(2)._replace(prefix=prefix)
    ids = tuple(sorted({int(free.tokens[0, 4]), int(free.tokens[1, 3])}))
    for min_length in (0, 8):
        settings = {**kwargs, "x": x, "eos_ids": ids, "min_length": min_length}
        result = speculative(2, gamma=gamma, **settings) if gamma else plain(2, **settings)
        if min_length == 0:
            for row, given in enumerate((3, 1)):
                length = int(result.lengths[row])
                expected = np.asarray(free.tokens)[row, given : given + length]
                np.testing.assert_array_equal(result.tokens[row, :length], expected)
                assert length < 8 and int(expected[-1]) in ids
        else:
            assert result.lengths.tolist() == [8, 8] and not np.isin(result.tokens, ids).any()


def test_coupled_rows_do_not_depend_on_their_batch():
    kwargs = {"gamma": 3, "temperature": 1.0, "rule": verification.coupled}
    together = speculative(3, **kwargs)
    last = jax.tree.map(lambda x: x[2:], inputs(3))
    alone = speculative(1, x=last, seeds=jnp.asarray([2], jnp.int32), **kwargs)
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[2])


def many(lenience=1.0, rule=verification.token, temperature=1.0, batch=256, **kwargs):
    return speculative(
        batch,
        gamma=4,
        drafter="near",
        temperature=temperature,
        rule=rule,
        lenience=lenience,
        eos_ids=(),
        max_length=16,
        **kwargs,
    )


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.2])
def test_the_share_of_guesses_that_pass_is_alpha(lenience):
    """Corollary 3.6, and appendix A.5 for lenience: alpha is the mean of sum min(p / l, q)."""
    result = jax.tree.map(np.asarray, many(lenience))
    trials = result.trials.sum()
    alpha = result.beta_sum.sum() / trials
    share = result.accepted.sum() / trials
    # A step cut by the limit counts its accepted guesses and not the rejection behind them: a small excess.
    assert abs(share - alpha) < 4 * np.sqrt(alpha * (1 - alpha) / trials) + 0.01
    assert (result.exact == (lenience == 1.0)).all()
    error = np.sqrt((result.alpha_error**2 * result.trials**2).sum()) / trials
    assert 0 < error < 0.02


def test_lenience_accepts_more():
    accepted = [float(np.sum(many(lenience).accepted)) for lenience in (1.0, 0.5, 0.2)]
    assert accepted == sorted(accepted) and accepted[0] < accepted[-1]
    greedy = [float(np.sum(many(lenience, temperature=0.0).accepted)) for lenience in (1.0, 0.3)]
    assert greedy[0] < greedy[1]


def test_block_accepts_at_least_as_much_as_token():
    calls = [int(np.sum(many(rule=rule).num_target_calls)) for rule in (verification.token, verification.block)]
    assert calls[1] < calls[0]


def test_the_default_rule():
    kwargs = {"gamma": 3, "temperature": 1.0}
    np.testing.assert_array_equal(
        speculative(2, **kwargs).tokens, speculative(2, rule=verification.block, **kwargs).tokens
    )
    lenient = speculative(2, lenience=0.5, **kwargs)
    np.testing.assert_array_equal(
        lenient.tokens, speculative(2, lenience=0.5, rule=verification.token, **kwargs).tokens
    )
    with pytest.raises(ValueError, match="lenience is 0.5 and the rule is block"):
        speculative(2, lenience=0.5, rule=verification.block, **kwargs)


def test_the_documented_rule_runs():
    """The example in verification.py's docstring."""
    assert verification.__doc__ is not None
    lines = verification.__doc__.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("def strict"))
    names = {"jnp": jnp}
    exec("\n".join(line[4:] for line in lines[start - 2 : start + 3]), names)
    result = speculative(2, gamma=3, temperature=1.0, rule=names["strict"])
    assert result.accepted.tolist() == [0, 0]
    np.testing.assert_array_equal(result.tokens, plain(2, temperature=1.0).tokens)


def test_bfloat16_tokens_are_near_the_teacher_forced_maximum(record_property):
    """In low precision a near tie may fall either way: every token is within a margin of the best one."""
    margin = 0.25
    half = T5(dataclasses.replace(TARGET.config, dtype=jnp.dtype("bfloat16")))
    tree = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target_params())
    draft = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.nudged(target_params(), 0.05))
    batch, length = 4, 20
    args = {
        "max_length": length,
        "sampling": make_sampling(batch, temperature=0.0),
        "seeds": jnp.arange(batch, dtype=jnp.int32),
        "eos_ids": (),
    }
    results = [
        autoregressive_decode(half, tree, inputs(batch), **args),
        *(speculative_decode(half, tree, ModelDrafter(half), draft, inputs(batch), gamma=g, **args) for g in (1, 5)),
    ]
    for result in results:
        decoder = jnp.pad(result.tokens, ((0, 0), (1, 0)))[:, :-1]
        logits = np.asarray(half.forward(tree, inputs(batch).encoder_tokens, decoder))
        chosen = np.take_along_axis(logits, np.asarray(result.tokens)[..., None], axis=-1)[..., 0]
        worst = float((logits.max(-1) - chosen).max())
        print(f"furthest below the maximum: {worst:.3g}")
        record_property("margin", worst)
        assert worst <= margin
    assert len(np.unique(results[0].tokens)) > 4 and VOCAB == logits.shape[-1]
