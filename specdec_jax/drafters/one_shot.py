"""All gamma guesses by one call, which sees none of them: the paper's non-autoregressive model, as a table."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from specdec_jax import verification
from specdec_jax.drafters.ngram import successors
from specdec_jax.drafters.table import TableParams
from specdec_jax.sampling import DRAW, PointMass, Sampling, StepKeys, standardize, uniforms
from specdec_jax.types import Inputs
from specdec_jax.verification import Proposal


@dataclasses.dataclass(frozen=True)
class OneShotDrafter:
    """Guess i is what was seen i places behind the newest token; a table with as many distances is its parameters.

    To draft with a model that says gamma distributions at once, put its call where `successors` is.
    """

    def init(self, params: TableParams, inputs: Inputs, cache_length: int) -> None:
        """Nothing is kept."""

    def propose(
        self,
        params: TableParams,
        state: None,
        tokens: Int32[Array, "batch capacity"],
        positions: Int32[Array, " batch"],
        *,
        gamma: int,
        wanted: Int32[Array, " batch"],
        sampling: Sampling,
        keys: StepKeys,
    ) -> tuple[Proposal, None]:
        """See `BlockDrafter.propose`."""
        if len(params.rest) < gamma:
            raise ValueError(
                f"gamma is {gamma} and the table has distances up to {len(params.rest)}; build it with "
                f"--distances={gamma}, or lower gamma."
            )
        newest = jnp.take_along_axis(tokens, positions[:, None], axis=1)[:, 0]
        logits = jnp.log(jnp.stack([successors(params, newest, i + 1) for i in range(gamma)], axis=1))
        # Every place is standardized as the first is: the tokens between are not known yet.
        each = jax.vmap(lambda one: standardize(one[:, None], sampling, tokens, positions), 1, 1)
        q = jax.tree.map(lambda x: x[:, :, 0], each(logits))
        num_guesses = jnp.full(positions.shape, gamma, jnp.int32)
        if isinstance(q, PointMass):
            return Proposal(q.tokens, None, num_guesses), state
        draw = jax.vmap(verification.draw_guess, (None, 1, 1, 0), 1)
        guesses = draw(keys, q, uniforms(keys, DRAW, gamma), jnp.arange(gamma, dtype=jnp.int32))
        return Proposal(guesses, q, num_guesses), state
