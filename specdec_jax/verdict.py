"""What came of a block of guesses, and verifying no more of it than the rows of a step need."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from specdec_jax.adaptation import widths
from specdec_jax.models.base import Cache
from specdec_jax.sampling import StepKeys
from specdec_jax.verification import Proposal


class Verdict(NamedTuple):
    """What came of a block; the extra token stands at place n and behind it."""

    num_accepted: Int32[Array, " batch"]
    emitted: Int32[Array, "batch block"]
    raw: Float32[Array, "batch block"]
    standardized: Float32[Array, "batch block"]
    is_nan: Bool[Array, "batch block"]
    beta: Float32[Array, "batch gamma"]


def verify_as_needed(
    verify: Callable[[StepKeys, Array, Proposal, Cache], tuple[Verdict, Cache]],
    keys: StepKeys,
    block: Int32[Array, "batch block"],
    proposal: Proposal,
    cache: Cache,
    needed: Int32[Array, ""],
) -> tuple[Verdict, Cache]:
    """Verifies a block's first tokens, by a target call of the least of a few widths that has those needed."""
    gamma = proposal.tokens.shape[1]
    sizes = widths(gamma)
    which = jnp.sum(jnp.asarray(sizes) < needed)

    def narrow(size: int, _: Array, carry: tuple[Verdict, Cache]) -> tuple[Verdict, Cache]:
        # XLA would take what does not depend on the carry out of a loop that may not run at all: tie it to the carry.
        tied = (block, proposal, keys.positions, keys.accept, keys.noise)
        (tokens, guesses, positions, accept, noise), cache = jax.lax.optimization_barrier((tied, carry[1]))
        first = Proposal(
            guesses.tokens[:, : size - 1],
            None if guesses.q is None else guesses.q[:, : size - 1],
            jnp.minimum(guesses.num_guesses, size - 1),
        )
        own = StepKeys(keys.rngs, positions, None if noise is None else noise[:, :size], accept)
        verdict, cache = verify(own, tokens[:, :size], first, cache)
        behind = [(0, 0), (0, gamma + 1 - size)]
        return jax.tree.map(lambda x: x if x.ndim == 1 else jnp.pad(x, behind), verdict), cache

    batch = block.shape[0]
    zeros = jnp.zeros((batch, gamma + 1), jnp.float32)
    nothing = Verdict(keys.positions, block, zeros, zeros, zeros > 0, zeros[:, :gamma])
    # Not lax.switch, whose branches copy what they pass through: a loop of no iteration or one leaves caches in place.
    carry = nothing, cache
    for i, size in enumerate(sizes):
        carry = jax.lax.fori_loop(0, (which == i).astype(jnp.int32), functools.partial(narrow, size), carry)
    verdict, cache = carry
    # Behind place n the extra token, whatever the width: a row must not show what the others needed.
    last = jnp.take_along_axis(verdict.emitted, verdict.num_accepted[:, None], axis=1)
    behind_n = jnp.arange(gamma + 1)[None] > verdict.num_accepted[:, None]
    return verdict._replace(emitted=jnp.where(behind_n, last, verdict.emitted)), cache
