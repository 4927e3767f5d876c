"""How many guesses a row makes in a step, decided as they are made: gamma is only their limit.

The best gamma is a matter of how likely the next guess is to stand (the paper's section 3.5), which differs from row to
row and from place to place. A further guess is worth making if, for some number of further ones, the tokens that they
promise are more than the same time would bring in other steps:

    product of chances so far  *  (first + first * alpha + ..)   >   rate * (cost of m guesses - cost of those made)

Chances come from the draft's own confidence and from a running estimate of the row's alpha; rate is what the best fixed
gamma would make of that alpha. Whether guess i counts is settled before it is drawn, from earlier guesses, from q up to
i, and from past steps. A drawn guess is never dropped for what it is: that would change the law.

A row's alpha is learnt from guesses that were tested. Where the draft has no confidence to tell, a row that finds none
worthwhile any more learns nothing new, and goes on without.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from specdec_jax.verification import Proposal


class Adaptation(NamedTuple):
    """What the choice needs to know; `specdec tune` measures it. Traced: another value does not compile anew.

    Attributes:
      costs: float32 [gamma + 1], entry m is what a step of m guesses costs, in steps of plain decoding.
      alpha: float32, acceptance as expected before anything is known of a row.
      weight: float32, as how many tested guesses that counts.
      trust: float32, by how much a guess's chance rises with the draft's confidence in it; 0 for not at all.
      confidence: float32, the confidence at which a guess's chance is alpha.
      c: float32, how much of the cost of a guess is its draft call, in steps of plain decoding; it is gone by the time
        that the draft's confidence is known. The first guess's is a part of every step.
    """

    costs: Float32[Array, " steps"]
    alpha: Float32[Array, ""]
    weight: Float32[Array, ""]
    trust: Float32[Array, ""]
    confidence: Float32[Array, ""]
    c: Float32[Array, ""]


def make_adaptation(
    gamma: int,
    *,
    costs: Sequence[float | int],
    alpha: float,
    weight: float = 8.0,
    trust: float = 0.0,
    confidence: float = 0.5,
    c: float = 0.0,
) -> Adaptation:
    """Builds an Adaptation from plain numbers; see there for what they are.

    Raises:
      ValueError: a number is out of its range, or there is not one cost for each number of guesses.
    """
    if len(costs) != gamma + 1:
        raise ValueError(f"adaptation has {len(costs)} costs and gamma is {gamma}; give those of 0 to {gamma} guesses.")
    if not all(0 < cost < math.inf for cost in costs) or list(costs) != sorted(costs):
        raise ValueError(f"costs of adaptation are {tuple(costs)}; give numbers above 0 that do not fall.")
    for name, value, low, high in (
        ("alpha", alpha, 0, 1),
        ("weight", weight, 1e-3, 1e6),
        ("trust", trust, 0, 100),
        ("confidence", confidence, 0, 1),
        ("c", c, 0, 1e6),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name} of adaptation is {value}; it must be {low} to {high}.")
    scalars = (jnp.float32(value) for value in (alpha, weight, trust, confidence, c))
    return Adaptation(jnp.asarray(costs, jnp.float32), *scalars)


class Outlook(NamedTuple):
    """What is expected of a row in this step.

    Attributes:
      alpha: float32 [batch], of a guess about which no more is known.
      rate: float32 [batch], tokens in the time of a step of plain decoding, by the best fixed gamma.
      least: float32 [batch, gamma], entry n is the chance that guess n, behind n others, needs to be worth making.
      least_kept: float32 [batch, gamma], the same to be worth verifying once it is made.
    """

    alpha: Float32[Array, " batch"]
    rate: Float32[Array, " batch"]
    least: Float32[Array, "batch gamma"]
    least_kept: Float32[Array, "batch gamma"]


def look(adaptation: Adaptation, beta_sum: Float32[Array, " batch"], trials: Int32[Array, " batch"]) -> Outlook:
    """Estimates each row's alpha from its past steps, and what that is worth (Theorem 3.8 with measured costs)."""
    alpha = (adaptation.alpha * adaptation.weight + beta_sum) / (adaptation.weight + trials)
    alpha, costs = jnp.clip(alpha, 0.0, 1.0), adaptation.costs
    n = jnp.arange(len(costs))
    upto = jnp.where(n[None, :] <= n[:, None], alpha[:, None, None] ** n[None, None], 0.0)
    sums = jnp.sum(upto, axis=2)  # entry n is 1 + alpha + .. + alpha^n
    rate = jnp.max(sums / costs[None], axis=1)
    made, total = n[:-1, None], n[None, 1:]
    further = sums[:, jnp.maximum(total - made - 1, 0)]
    extra = costs[None, 1:] - costs[:-1, None]
    spent = jnp.where(made > 0, adaptation.c, 0.0)

    def least(extra: Array) -> Array:
        needed = rate[:, None, None] * jnp.maximum(extra, 0.0)[None] / further
        return jnp.min(jnp.where((total > made)[None], needed, jnp.inf), axis=2)

    return Outlook(alpha, rate, least(extra), least(extra - spent))


def chance(
    adaptation: Adaptation, alpha: Float32[Array, "*shape"], confidence: Float32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """The chance that a guess stands if all before it do."""
    return jnp.clip(alpha + adaptation.trust * (confidence - adaptation.confidence), 0.0, 1.0)


def find_wanted(adaptation: Adaptation, outlook: Outlook, running: Bool[Array, " batch"]) -> Int32[Array, " batch"]:
    """For how many guesses of a block each row has a use, by its past alone; 1 at least, and 0 of a row that has ended.

    The one is made whatever it is worth, so that a draft model is never more than two tokens behind.
    """
    gamma = len(adaptation.costs) - 1
    expected = jnp.broadcast_to(outlook.alpha[:, None], (len(running), gamma))
    best = _most_profitable(adaptation, outlook, expected, jnp.full(running.shape, gamma))
    return jnp.where(running, jnp.maximum(best, 1), 0)


def shorten(adaptation: Adaptation, outlook: Outlook, proposal: Proposal) -> Proposal:
    """Leaves of a block that was proposed at once as many guesses as are worth verifying.

    Exact, since it looks at the proposal's confidence, which was told before the guesses were drawn, and not at them.
    """
    expected = jnp.broadcast_to(outlook.alpha[:, None], proposal.tokens.shape)
    if proposal.confidence is not None:
        expected = chance(adaptation, expected, proposal.confidence)
    return proposal._replace(num_guesses=_most_profitable(adaptation, outlook, expected, proposal.num_guesses))


def _most_profitable(
    adaptation: Adaptation,
    outlook: Outlook,
    expected: Float32[Array, "batch gamma"],
    most: Int32[Array, " batch"],
) -> Int32[Array, " batch"]:
    """How many guesses, of so many at most, bring the most tokens beyond what their time would bring elsewhere."""
    gain = jnp.pad(jnp.cumsum(jnp.cumprod(expected, axis=1), axis=1), ((0, 0), (1, 0)))
    profit = gain - outlook.rate[:, None] * (adaptation.costs - adaptation.costs[0])[None]
    allowed = jnp.arange(profit.shape[1])[None] <= most[:, None]
    return jnp.argmax(jnp.where(allowed, profit, -jnp.inf), axis=1).astype(jnp.int32)


def widths(gamma: int) -> list[int]:
    """Tokens of the target calls that there are: powers of two, and gamma + 1."""
    return [*(2**i for i in range(gamma.bit_length() + 1) if 2**i <= gamma), gamma + 1]
