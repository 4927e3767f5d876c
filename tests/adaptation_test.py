"""Adaptive gamma: outputs are what they were, rows decide for themselves, and decisions are sensible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_pair import TARGET, consistent, inputs, plain, same_tokens, speculative, target_params

from specdec_jax import verification
from specdec_jax.adaptation import find_wanted, look, make_adaptation, shorten, widths
from specdec_jax.decoding import decode as jitted
from specdec_jax.drafters.copying import CopyDrafter
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.sampling import make_sampling
from specdec_jax.types import Inputs
from specdec_jax.verification import Proposal

GAMMA = 5
COSTS = [1 + 0.15 * i for i in range(GAMMA + 1)]


def adaptation(costs=COSTS, alpha=0.6, weight=4.0, trust=0.8, confidence=0.5, c=0.0):
    told = dict(costs=costs, alpha=alpha, weight=weight, trust=trust, confidence=confidence, c=c)
    return make_adaptation(len(costs) - 1, **told)


def decode(batch, chosen=None, *, drafter="near", **how):
    return speculative(batch, gamma=GAMMA, drafter=drafter, adaptation=chosen or adaptation(), **how)


def steps(result, row):
    """The guesses of a row's steps, without those of others that went on."""
    return np.asarray(result.step_guesses[row])[np.asarray(result.step_accepted[row]) >= 0]


def made(result):
    """Guesses of each step of each row."""
    return np.asarray((result.step_guesses >= 0).sum(-1))[np.asarray(result.step_accepted) >= 0]


@pytest.mark.parametrize("drafter", ["model", "copy"])
def test_greedy_and_coupled_equal_plain_decoding(drafter):
    some = (CopyDrafter(), None) if drafter == "copy" else "near"
    result = decode(4, drafter=some)
    same_tokens(result, plain(4))
    consistent(result)
    assert len(set(made(result))) > 2  # it does vary
    coupled = decode(4, drafter=some, temperature=1.0, rule=verification.coupled)
    same_tokens(coupled, plain(4, temperature=1.0, rule=verification.coupled))


@pytest.mark.parametrize("rule", [verification.token, verification.block])
def test_a_row_does_not_depend_on_its_batch(rule):
    """Above temperature 0: how many guesses the others make, and how wide the target's call is, must not show."""
    together = decode(4, temperature=1.0, rule=rule)
    tokens = inputs(4).encoder_tokens
    for row in range(2):
        seeds = jnp.asarray([row], jnp.int32)
        alone = decode(1, x=Inputs(tokens[row : row + 1]), seeds=seeds, temperature=1.0, rule=rule)
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[0])
        np.testing.assert_array_equal(steps(together, row), steps(alone, 0))


def test_free_guesses_are_all_made_and_dear_ones_none():
    free = decode(3, adaptation(costs=[1.0] * (GAMMA + 1), trust=0.0))
    assert (made(free) == GAMMA).all()
    dear = decode(3, adaptation(costs=[1.0, *[50.0] * GAMMA]))
    assert (made(dear) == 0).all()
    same_tokens(dear, plain(3))


def test_all_guesses_made_is_fixed_gamma():
    """The same draws, the same numbers for every test: the very same steps, also above temperature 0."""
    every = adaptation(costs=[1.0] * (GAMMA + 1), trust=0.0, alpha=1.0, weight=1e6)
    for temperature in (0.0, 1.0):
        free = decode(3, every, temperature=temperature)
        fixed = speculative(3, gamma=GAMMA, temperature=temperature)
        same_tokens(free, fixed)
        for row in range(3):
            np.testing.assert_array_equal(steps(free, row), steps(fixed, row))
        np.testing.assert_array_equal(free.step_accepted, fixed.step_accepted)


def test_another_value_does_not_compile_anew_and_leaks_nothing():
    first = decode(2)
    size = jitted._cache_size()
    other = decode(2, adaptation(alpha=0.1, trust=0.0, costs=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    again = decode(2)
    assert jitted._cache_size() == size
    assert not np.array_equal(made(first), made(other))
    np.testing.assert_array_equal(first.step_guesses, again.step_guesses)


def test_the_estimate_of_alpha_follows_the_row():
    found = look(adaptation(alpha=0.5, weight=4.0), jnp.asarray([0.0, 36.0, 0.0]), jnp.asarray([0, 36, 36]))
    np.testing.assert_allclose(found.alpha, [0.5, 38 / 40, 2 / 40], rtol=1e-6)
    costs = np.asarray(COSTS)
    for alpha, rate in zip(np.asarray(found.alpha), np.asarray(found.rate), strict=True):
        best = max(sum(alpha**i for i in range(m + 1)) / costs[m] for m in range(GAMMA + 1))
        np.testing.assert_allclose(rate, best, rtol=1e-5)


def test_worthwhile_is_what_some_number_of_further_guesses_pays_for():
    some = adaptation(costs=[1.0, 1.5, 1.8, 2.1, 3.1, 3.4], c=0.3)  # calls of one, of up to four, of up to six tokens
    for alpha in (0.2, 0.5, 0.8):
        outlook = look(some._replace(alpha=jnp.float32(alpha)), jnp.zeros(1), jnp.zeros(1, jnp.int32))
        for num in range(GAMMA):
            for chance in (0.011, 0.071, 0.21, 0.43, 0.69, 0.97):
                gains = [
                    chance * sum(alpha**j for j in range(m - num))
                    - float(outlook.rate[0]) * float(some.costs[m] - some.costs[num])
                    for m in range(num + 1, GAMMA + 1)
                ]
                assert (chance > float(outlook.least[0, num])) == (max(gains) > 0)
                spent = float(outlook.rate[0]) * (0.3 if num else 0.0)  # the first guess's call is in every step
                assert (chance > float(outlook.least_kept[0, num])) == (max(gains) + spent > 0)


def test_a_block_is_shortened_by_its_confidence_and_not_by_its_guesses():
    some, zero = adaptation(trust=1.0), jnp.zeros(2)
    outlook = look(some, zero, jnp.zeros(2, jnp.int32))
    sure = jnp.asarray([[0.9, 0.9, 0.9, 0.05, 0.9], [0.02] * 5])
    block = Proposal(jnp.zeros((2, 5), jnp.int32), None, jnp.asarray([5, 5]), sure)
    np.testing.assert_array_equal(shorten(some, outlook, block).num_guesses, [3, 0])
    np.testing.assert_array_equal(
        shorten(some, outlook, block._replace(num_guesses=jnp.asarray([2, 5]))).num_guesses, [2, 0]
    )
    other = block._replace(tokens=block.tokens + 7)
    np.testing.assert_array_equal(shorten(some, outlook, other).num_guesses, [3, 0])


def test_what_is_wanted_of_a_block_is_what_a_row_without_confidence_verifies():
    some, trials = adaptation(costs=[1.0, 1.2, 1.4, 1.6, 1.8, 2.0], weight=1.0), jnp.full(4, 50)
    outlook = look(some, jnp.asarray([0.0, 25.0, 49.0, 49.0]), trials)
    wanted = find_wanted(some, outlook, jnp.asarray([True, True, True, False]))
    block = Proposal(jnp.zeros((4, GAMMA), jnp.int32), None, jnp.full(4, GAMMA))
    verified = shorten(some, outlook, block).num_guesses
    assert verified[0] == 0 < verified[1] < verified[2] == GAMMA
    np.testing.assert_array_equal(wanted, [1, verified[1], GAMMA, 0])  # one is made in any case, none of an ended row


def test_widths():
    assert widths(1) == [1, 2] and widths(3) == [1, 2, 4] and widths(5) == [1, 2, 4, 6] and widths(7) == [1, 2, 4, 8]


def test_caches_are_not_copied():
    """Only the width that is needed runs, and the caches are passed through all of them in place."""
    args = (TARGET, target_params(), ModelDrafter(TARGET), target_params(), inputs(1))
    sampling = make_sampling(1, temperature=0.0)

    def copies(chosen):
        lowered = jitted.lower(
            *args,
            gamma=GAMMA,
            max_length=30,
            sampling=sampling,
            draft_sampling=sampling,
            seeds=jnp.arange(1),
            eos_ids=jnp.asarray([1]),
            rule=verification.token,
            lenience=1.0,
            adaptation=chosen,
        )
        capacity = 30 + GAMMA + 1
        shape = f"f32[1,{TARGET.config.num_heads},{capacity},{TARGET.config.head_dim}]"
        lines = lowered.compile().as_text().splitlines()
        body = [line for line in lines if " copy(" in line and f"= {shape}" in line]
        return len(body)

    assert copies(adaptation()) <= copies(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"costs": [1.0, 2.0]}, "adaptation has 2 costs and gamma is 5"),
        ({"costs": [2.0, 1.0, 1.0, 1.0, 1.0, 1.0]}, "give numbers above 0 that do not fall"),
        ({"costs": [float("nan")] * 6}, "give numbers above 0"),
        ({"alpha": 1.5}, r"alpha of adaptation is 1\.5; it must be 0 to 1"),
        ({"trust": -1.0}, "trust of adaptation is -1"),
        ({"weight": 0.0}, "weight of adaptation is 0"),
    ],
)
def test_mistakes_are_told(change, message):
    with pytest.raises(ValueError, match=message):
        make_adaptation(GAMMA, **{"costs": COSTS, "alpha": 0.5, **change})
    with pytest.raises(ValueError, match=r"adaptation.costs has shape \(3,\) and gamma is 5"):
        decode(1, adaptation(costs=COSTS[:3]))


def test_nan_of_the_draft_ends_no_row():
    broken = jax.tree.map(lambda x: x * jnp.nan, target_params())
    result = decode(2, drafter=(ModelDrafter(TARGET), broken), temperature=1.0)
    assert (made(result) == 0).all() and (result.finish_reason != 2).all()
