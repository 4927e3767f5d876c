"""Rules of verification: which guesses are accepted, and what is emitted after them.

    token      Algorithm 1's test, one guess after the other (section 2.3)
    block      the guesses are tested together, and never fewer are accepted (Sun et al., arXiv 2403.10444)
    coupled    the target's draw at each place, which a guess has to hit: the very tokens of plain decoding

A rule is any function of their signature:

    from specdec_jax.sampling import EXTRA, draw, uniforms

    def strict(keys, target, proposal, lenience):  # accepts nothing: plain decoding, the slow way
        n = jnp.zeros_like(proposal.num_guesses)
        return n, draw(target.p[:, 0], uniforms(keys, EXTRA, 1)[:, 0])

    speculative_decode(..., rule=strict)

Pure and model-free. The pieces keep the dtype of their inputs, so that laws can be enumerated in float64.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Key

from specdec_jax.sampling import (
    ACCEPT,
    EXTRA,
    PointMass,
    Standardized,
    StepKeys,
    draw,
    draw_coupled,
    gumbel_noise,
    uniforms,
)


class Proposal(NamedTuple):
    """The draft's guesses.

    Attributes:
      tokens: int32 [batch, gamma], x_1 to x_gamma.
      q: [batch, gamma, vocab], the distributions they were drawn from; None for a point mass at each guess, for which
        nothing as wide as the vocabulary is built.
      num_guesses: int32 [batch], how many of them count, 0 to gamma. Whether guess i counts must have been decided
        before it was drawn: dropping a drawn guess because of what it is changes the law.
      confidence: float32 [batch, gamma], how likely the drafter itself takes each guess to be accepted, told from what
        was known before it was drawn; None where it has no opinion. Only adaptive gamma asks.
    """

    tokens: Int32[Array, "batch gamma"]
    q: Float[Array, "batch gamma vocab"] | None
    num_guesses: Int32[Array, " batch"]
    confidence: Float32[Array, "batch gamma"] | None = None


class Target(NamedTuple):
    """What the target says at the gamma + 1 places of a block.

    Attributes:
      p: standardized distributions, [batch, gamma + 1, vocab] or a PointMass.
      logits: float32 [batch, gamma + 1, vocab], before temperature and filters; up to a constant log-probabilities.
      greedy: bool [batch], rows whose temperature is 0.
    """

    p: Standardized
    logits: Float32[Array, "batch block vocab"]
    greedy: Bool[Array, " batch"]


Rule: TypeAlias = Callable[
    [StepKeys, Target, Proposal, Float32[Array, ""]], tuple[Int32[Array, " batch"], Int32[Array, " batch"]]
]
"""A rule of verification: (keys, target, proposal, lenience) -> (num_accepted, extra_token), both int32 [batch]."""


def accepts(
    r: Float[Array, "*shape"], p: Float[Array, "*shape"], q: Float[Array, "*shape"], lenience: Float[Array, ""]
) -> Bool[Array, "*shape"]:
    """Whether a guess passes, given r ~ U[0, 1) and its probabilities under target and draft.

    Strict, because r is exactly 0 now and then and p = 0 must never pass.
    """
    return r * lenience * q < p


def accept_probability(
    p: Float[Array, "*shape"], q: Float[Array, "*shape"], lenience: Float[Array, ""]
) -> Float[Array, "*shape"]:
    """The probability that `accepts` is True: min(1, p / (lenience q)), and 0 where p is 0."""
    scaled = lenience * q
    return jnp.where(p >= scaled, jnp.where(p > 0, 1.0, 0.0), p / jnp.where(scaled > 0, scaled, 1.0))


def residual(p: Float[Array, "*lead vocab"], q: Float[Array, "*lead vocab"]) -> Float[Array, "*lead vocab"]:
    """norm(max(0, p - q)), the law of the token that replaces a rejected guess.

    Where it is 0 everywhere, because p equals q up to rounding, a rejection was a matter of rounding too: p itself.
    """
    above = jnp.maximum(p - q, 0)
    total = jnp.sum(above, axis=-1, keepdims=True)
    return jnp.where(total > 0, above / jnp.where(total > 0, total, 1), p)


def count_accepted(passed: Bool[Array, "batch gamma"], num_guesses: Int32[Array, " batch"]) -> Int32[Array, " batch"]:
    """n: how many guesses stand before the first that did not pass, or that does not count."""
    passed = passed & (jnp.arange(passed.shape[1])[None] < num_guesses[:, None])
    return jnp.sum(jnp.cumprod(passed.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def extra_law(
    p: Float[Array, "batch block vocab"],
    proposal: Proposal,
    num_accepted: Int32[Array, " batch"],
    weight: Float[Array, " batch"] | None = None,
) -> Float[Array, "batch vocab"]:
    """The law of the extra token: p_{n+1} where every guess was accepted, else norm(max(0, weight p_{n+1} - q_{n+1})).

    Args:
      p: the target's distributions.
      proposal: the guesses.
      num_accepted: n.
      weight: what p is multiplied with in the residual, the block rule's P_n; None for 1.
    """
    place = num_accepted[:, None, None]
    p_next = jnp.take_along_axis(p, place, axis=1)[:, 0]
    gamma = proposal.tokens.shape[1]
    if gamma == 0:
        return p_next
    place = jnp.minimum(place, gamma - 1)
    if proposal.q is None:
        guess = jnp.take_along_axis(proposal.tokens, place[:, 0], axis=1)
        q_next = (jnp.arange(p.shape[-1])[None] == guess).astype(p.dtype)
    else:
        q_next = jnp.take_along_axis(proposal.q, place, axis=1)[:, 0]
    rejected = num_accepted < proposal.num_guesses
    weighted = p_next if weight is None else weight[:, None] * p_next
    return jnp.where(rejected[:, None], residual(weighted, q_next), p_next)


def at_guesses(
    x: Float[Array, "batch block vocab"], tokens: Int32[Array, "batch gamma"]
) -> Float[Array, "batch gamma"]:
    """x[b, i, tokens[b, i]]."""
    return jnp.take_along_axis(x[:, : tokens.shape[1]], tokens[..., None], axis=-1)[..., 0]


def _q_of_guesses(proposal: Proposal, dtype: jnp.dtype) -> Float[Array, "batch gamma"]:
    if proposal.q is None:
        return jnp.ones(proposal.tokens.shape, dtype)
    return at_guesses(proposal.q, proposal.tokens)


def _likely_enough(target: Target, gamma: int, lenience: Float[Array, ""]) -> Float[Array, "batch gamma"]:
    """The logit from which on a row of temperature 0 accepts any guess; infinite where nothing is lenient."""
    likely = jnp.log(lenience) + jnp.max(target.logits[:, :gamma], axis=-1)
    return jnp.where(target.greedy[:, None] & (lenience < 1), likely, jnp.inf)


def token(
    keys: StepKeys, target: Target, proposal: Proposal, lenience: Float32[Array, ""]
) -> tuple[Int32[Array, " batch"], Int32[Array, " batch"]]:
    """Algorithm 1's token-by-token test.

    Args:
      keys: the step's random keys.
      target: what the target says at the gamma + 1 places.
      proposal: the guesses.
      lenience: 1 is exact. Below 1, q is scaled in the comparison only, and a row of temperature 0 accepts a guess at
        least `lenience` times as likely as the likeliest id (appendix A.5).

    Returns:
      num_accepted: int32 [batch], n.
      extra_token: int32 [batch], t.
    """
    p, guesses = target.p, proposal.tokens
    gamma = guesses.shape[1]
    near_best = at_guesses(target.logits, guesses) >= _likely_enough(target, gamma, lenience)
    if isinstance(p, PointMass):  # p(x) is 1 or 0, whatever q is: accepted when equal
        n = count_accepted((guesses == p.tokens[:, :-1]) | near_best, proposal.num_guesses)
        return n, jnp.take_along_axis(p.tokens, n[:, None], axis=1)[:, 0]
    # 3. r_i ~ U(0,1); n = min({i-1 : r_i > p_i(x_i)/q_i(x_i)} or {gamma})
    r = uniforms(keys, ACCEPT, gamma)
    passed = accepts(r, at_guesses(p, guesses), _q_of_guesses(proposal, p.dtype), lenience)
    n = count_accepted(passed | near_best, proposal.num_guesses)
    # 4. p' = p_{n+1}; if n < gamma: p' = norm(max(0, p_{n+1} - q_{n+1})).   5. t ~ p'
    return n, draw(extra_law(p, proposal, n), uniforms(keys, EXTRA, 1)[:, 0])


def block_weights(p: Float[Array, "batch gamma"], q: Float[Array, "batch gamma"]) -> Float[Array, "batch block"]:
    """P_0 = 1 and P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)), given the guesses' probabilities; [batch, gamma + 1]."""
    one = jnp.ones((), p.dtype)

    def next_weight(weight: Array, p_and_q: tuple[Array, Array]) -> tuple[Array, Array]:
        weight = accept_probability(weight * p_and_q[0], p_and_q[1], one)
        return weight, weight

    first = jnp.ones(p.shape[:1], p.dtype)
    _, weights = jax.lax.scan(next_weight, first, (p.T, q.T))
    return jnp.concatenate([first[:, None], weights.T], axis=1)


def block_accept_probability(
    weights: Float[Array, "batch block"], p: Float[Array, "batch block vocab"], proposal: Proposal
) -> Float[Array, "batch gamma"]:
    """h_i = S_i / (S_i + 1 - P_i) with S_i = sum_x max(0, P_i p_{i+1}(x) - q_{i+1}(x)); h of a row's last guess is P_i.

    Entry i - 1 is h_i, the probability with which guess i passes; entries behind the row's last guess mean nothing.
    """
    tokens = proposal.tokens
    gamma = tokens.shape[1]
    here = weights[:, 1:]  # P_1 .. P_gamma
    if proposal.q is None:
        above = here[:, :-1] * (1 - at_guesses(p, tokens)[:, 1:])
    else:
        above = jnp.sum(jnp.maximum(here[:, :-1, None] * p[:, 1:gamma] - proposal.q[:, 1:], 0), axis=-1)
    above = jnp.pad(above, ((0, 0), (0, 1)))
    total = above + 1 - here
    h = jnp.where(total > 0, above / jnp.where(total > 0, total, 1), 1)  # 0/0: P_i is 1, and nothing is above q
    last = jnp.arange(1, gamma + 1)[None] == proposal.num_guesses[:, None]
    return jnp.where(last, here, h)


def count_block(passed: Bool[Array, "batch gamma"], num_guesses: Int32[Array, " batch"]) -> Int32[Array, " batch"]:
    """The block rule's n: the last guess that passed, whatever came of those before it."""
    number = jnp.arange(1, passed.shape[1] + 1, dtype=jnp.int32)[None]
    counts = passed & (number <= num_guesses[:, None])
    return jnp.max(jnp.where(counts, number, 0), axis=1, initial=0)


def block(
    keys: StepKeys, target: Target, proposal: Proposal, lenience: Float32[Array, ""]
) -> tuple[Int32[Array, " batch"], Int32[Array, " batch"]]:
    """Block verification; see `token` for arguments and results. Exact only, so `lenience` has to be 1."""
    p, guesses = target.p, proposal.tokens
    gamma = guesses.shape[1]
    if isinstance(p, PointMass) or gamma == 0:
        return token(keys, target, proposal, lenience)
    # A guess at a place where p is NaN does not count: known before it was drawn, so the law stays.
    proposal = proposal._replace(num_guesses=count_accepted(~jnp.isnan(p[:, :gamma, 0]), proposal.num_guesses))
    weights = block_weights(at_guesses(p, guesses), _q_of_guesses(proposal, p.dtype))
    h = block_accept_probability(weights, p, proposal)
    n = count_block(uniforms(keys, ACCEPT, gamma) < h, proposal.num_guesses)
    weight = jnp.take_along_axis(weights, n[:, None], axis=1)[:, 0]
    return n, draw(extra_law(p, proposal, n, weight), uniforms(keys, EXTRA, 1)[:, 0])


def coupled(
    keys: StepKeys, target: Target, proposal: Proposal, lenience: Float32[Array, ""]
) -> tuple[Int32[Array, " batch"], Int32[Array, " batch"]]:
    """Emits the target's own draws, argmax(log p + noise), and accepts a guess that equals its place's.

    The noise belongs to the absolute position and guesses are drawn with it too (`draw_guess`), so they are often
    equal; what is emitted does not depend on them. See `token` for arguments and results. `lenience` has to be 1.
    """
    del lenience
    if isinstance(target.p, PointMass):
        tokens = target.p.tokens
    elif keys.noise is None:
        raise ValueError(
            "there is no noise to share; it is made for verification.coupled itself, not for a copy of it."
        )
    else:
        tokens = draw_coupled(target.p, keys.noise)
    n = count_accepted(proposal.tokens == tokens[:, :-1], proposal.num_guesses)
    return n, jnp.take_along_axis(tokens, n[:, None], axis=1)[:, 0]


def step_keys(
    rule: Rule, rngs: Key[Array, " batch"], positions: Int32[Array, " batch"], gamma: int, vocab: int
) -> StepKeys:
    """A step's random keys, with the noise that the coupled rule shares between target and draft."""
    noise = gumbel_noise(rngs, positions, gamma + 1, vocab) if rule is coupled else None
    return StepKeys(rngs, positions, noise)


def draw_guess(
    keys: StepKeys, q: Float[Array, "batch vocab"], u: Float32[Array, " batch"], place: Int32[Array, ""]
) -> Int32[Array, " batch"]:
    """x_i ~ q_i: by the shared noise of its place where there is one, else by inverse CDF at u."""
    if keys.noise is None:
        return draw(q, u)
    return draw_coupled(q, jax.lax.dynamic_index_in_dim(keys.noise, place, axis=1, keepdims=False))


def default_rule(lenience: float | int) -> Rule:
    """The block rule; the token rule where lenience is below 1, since it alone knows what to do with that."""
    return block if lenience == 1 else token


def check_lenience(rule: Rule, lenience: float | int) -> None:
    """Refuses a lenience that is out of range or means nothing to the rule.

    Raises:
      ValueError: it says which.
    """
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience is {lenience}; it must be above 0 and at most 1 (1 is exact).")
    if lenience < 1 and rule in (block, coupled):
        raise ValueError(
            f"lenience is {lenience} and the rule is {rule.__name__}, which is exact or nothing; use the token rule."
        )


def beta(target: Target, proposal: Proposal, lenience: Float[Array, ""]) -> Float[Array, "batch gamma"]:
    """The token rule's probability of acceptance at each guess's place, sum_x min(p(x) / lenience, q(x)).

    With lenience 1 the paper's beta (Definition 3.1, Theorem 3.5), which is about the two models and not about the
    rule; below 1 that of appendix A.5.
    """
    p, q, tokens = target.p, proposal.q, proposal.tokens
    gamma = tokens.shape[1]
    logits, likely = target.logits[:, :gamma], _likely_enough(target, gamma, lenience)
    if q is None:
        if isinstance(p, PointMass):
            chance = (p.tokens[:, :-1] == tokens).astype(logits.dtype)
        else:
            chance = jnp.minimum(at_guesses(p, tokens) / lenience, 1)
        return jnp.where(at_guesses(logits, tokens) >= likely, 1, chance)
    ids = jnp.arange(q.shape[-1])[None, None]
    p = (ids == p.tokens[:, :gamma, None]).astype(q.dtype) if isinstance(p, PointMass) else p[:, :gamma]
    accepted = jnp.minimum(p / lenience, q)
    return jnp.sum(jnp.where(logits >= likely[..., None], q, accepted), axis=-1)
