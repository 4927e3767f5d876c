"""Algorithm 1's test (section 2.3): which guesses are accepted, and what is emitted after them.

Pure and model-free. The pieces keep the dtype of their inputs, so that laws can be enumerated in float64.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from specdec_jax.sampling import ACCEPT, EXTRA, PointMass, Standardized, StepKeys, draw, uniforms


class Proposal(NamedTuple):
    """The draft's guesses.

    Attributes:
      tokens: int32 [batch, gamma], x_1 to x_gamma.
      q: [batch, gamma, vocab], the distributions they were drawn from; None for a point mass at each guess, for which
        nothing as wide as the vocabulary is built.
      num_guesses: int32 [batch], how many of them count, 0 to gamma. Whether guess i counts must have been decided
        before it was drawn: dropping a drawn guess because of what it is changes the law.
    """

    tokens: Int32[Array, "batch gamma"]
    q: Float[Array, "batch gamma vocab"] | None
    num_guesses: Int32[Array, " batch"]


class Target(NamedTuple):
    """What the target says at the gamma + 1 places of a block.

    Attributes:
      p: standardized distributions, [batch, gamma + 1, vocab] or a PointMass.
      log_probs: float32 [batch, gamma + 1, vocab], raw log-probabilities.
    """

    p: Standardized
    log_probs: Float32[Array, "batch block vocab"]


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
    p: Float[Array, "batch block vocab"], proposal: Proposal, num_accepted: Int32[Array, " batch"]
) -> Float[Array, "batch vocab"]:
    """The law of the extra token: p_{n+1} where every guess was accepted, else the residual."""
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
    return jnp.where(rejected[:, None], residual(p_next, q_next), p_next)


def at_guesses(
    x: Float[Array, "batch block vocab"], tokens: Int32[Array, "batch gamma"]
) -> Float[Array, "batch gamma"]:
    """x[b, i, tokens[b, i]]."""
    return jnp.take_along_axis(x[:, : tokens.shape[1]], tokens[..., None], axis=-1)[..., 0]


def token(
    keys: StepKeys, target: Target, proposal: Proposal, lenience: Float32[Array, ""]
) -> tuple[Int32[Array, " batch"], Int32[Array, " batch"]]:
    """Algorithm 1's token-by-token test.

    Args:
      keys: the step's random keys.
      target: what the target says at the gamma + 1 places.
      proposal: the guesses.
      lenience: 1 is exact; below 1, q is scaled in the comparison only (appendix A.5).

    Returns:
      num_accepted: int32 [batch], n.
      extra_token: int32 [batch], t.
    """
    p, guesses = target.p, proposal.tokens
    if isinstance(p, PointMass):  # p(x) is 1 or 0, whatever q is: accepted when equal
        n = count_accepted(guesses == p.tokens[:, :-1], proposal.num_guesses)
        return n, jnp.take_along_axis(p.tokens, n[:, None], axis=1)[:, 0]
    q_guess = jnp.ones((), p.dtype) if proposal.q is None else at_guesses(proposal.q, guesses)
    # 3. r_i ~ U(0,1); n = min({i-1 : r_i > p_i(x_i)/q_i(x_i)} or {gamma})
    r = uniforms(keys, ACCEPT, guesses.shape[1])
    p_guess = at_guesses(p, guesses)
    passed = accepts(r, p_guess, jnp.broadcast_to(q_guess, p_guess.shape), lenience)
    n = count_accepted(passed, proposal.num_guesses)
    # 4. p' = p_{n+1}; if n < gamma: p' = norm(max(0, p_{n+1} - q_{n+1})).   5. t ~ p'
    return n, draw(extra_law(p, proposal, n), uniforms(keys, EXTRA, 1)[:, 0])


def beta(p: Standardized, proposal: Proposal) -> Float[Array, "batch gamma"]:
    """The probability of acceptance at each guess's place, sum_x min(p(x), q(x)) (Definition 3.1, Theorem 3.5)."""
    tokens = proposal.tokens
    if isinstance(p, PointMass):
        if proposal.q is None:
            return (p.tokens[:, :-1] == tokens).astype(jnp.float32)
        return at_guesses(proposal.q, p.tokens[:, :-1])
    if proposal.q is None:
        return at_guesses(p, tokens)
    return jnp.sum(jnp.minimum(p[:, : tokens.shape[1]], proposal.q), axis=-1)
