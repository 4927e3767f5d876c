"""The drafting half of a step: gamma guesses per row, and q, the law that each was drawn from."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from specdec_jax import verification
from specdec_jax.drafters.base import BlockDrafter, Drafter, DrafterState
from specdec_jax.sampling import DRAW, PointMass, Sampling, StepKeys, standardize, uniforms
from specdec_jax.types import Params
from specdec_jax.verification import Proposal


def propose(
    drafter: Drafter | BlockDrafter | None,
    params: Params,
    drafter_state: DrafterState,
    tokens: Int32[Array, "batch capacity"],
    keys: StepKeys,
    gamma: int,
    sampling: Sampling,
    vocab_size: int,
) -> tuple[Proposal, Int32[Array, "batch capacity"], DrafterState]:
    """1. for i = 1 .. gamma: q_i = M_q(prefix + x_1 .. x_{i-1}); x_i ~ q_i. Writes the guesses into the history too."""
    batch = tokens.shape[0]
    if drafter is None:
        nothing = Proposal(jnp.zeros((batch, 0), jnp.int32), None, jnp.zeros((batch,), jnp.int32))
        return nothing, tokens, drafter_state
    if isinstance(drafter, BlockDrafter):
        proposal, drafter_state = drafter.propose(
            params, drafter_state, tokens, keys.positions, gamma=gamma, sampling=sampling, keys=keys
        )
        return proposal, write(tokens, proposal.tokens, keys.positions + 1), drafter_state

    def guess(carry: tuple, i_and_u: tuple, *, first: bool) -> tuple:
        tokens, drafter_state = carry
        i, u = i_and_u
        positions = keys.positions + i
        logits, drafter_state = drafter.step(params, drafter_state, tokens, positions, first=first)
        if isinstance(logits, PointMass):
            q = logits
        else:
            if logits.shape[-1] != vocab_size:
                raise ValueError(
                    f"The draft has a vocabulary of {logits.shape[-1]} ids and the target one of {vocab_size}; "
                    "use two models with the same vocabulary."
                )
            q = standardize(logits[:, None], sampling, tokens, positions)
        if isinstance(q, PointMass):
            x, q = q.tokens[:, 0], None
        else:
            q = q[:, 0]
            x = verification.draw_guess(keys, q, u, i)
        tokens = write(tokens, x[:, None], positions + 1)
        return (tokens, drafter_state), (x, q)

    u = uniforms(keys, DRAW, gamma).T
    carry, (x, q) = guess((tokens, drafter_state), (jnp.int32(0), u[0]), first=True)
    xs, qs = x[:, None], None if q is None else q[:, None]
    if gamma > 1:  # the rest in a loop of its own: the program stays small whatever gamma is
        rest = (jnp.arange(1, gamma, dtype=jnp.int32), u[1:])
        carry, (x, q) = jax.lax.scan(functools.partial(guess, first=False), carry, rest)
        xs = jnp.concatenate([xs, x.T], axis=1)
        qs = None if qs is None else jnp.concatenate([qs, q.swapaxes(0, 1)], axis=1)
    num_guesses = jnp.full((batch,), gamma, jnp.int32)
    if qs is not None:  # a guess whose q is NaN does not count; known before it was drawn, so still exact
        num_guesses = verification.count_accepted(~jnp.isnan(qs[..., 0]), num_guesses)
    tokens, drafter_state = carry
    return Proposal(xs, qs, num_guesses), tokens, drafter_state


def write(buffer: Array, values: Array, starts: Int32[Array, " batch"]) -> Array:
    """Overwrites each row from its own start on."""
    return jax.vmap(lambda row, new, start: jax.lax.dynamic_update_slice(row, new, (start,)))(
        buffer, values.astype(buffer.dtype), starts
    )
