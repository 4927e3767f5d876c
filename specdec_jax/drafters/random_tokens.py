"""Tokens at random: the paper's curiosity, and a drafter that anything but exact verification would show."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int32

from specdec_jax.sampling import DRAW, Sampling, StepKeys, uniforms
from specdec_jax.types import Inputs, Params
from specdec_jax.verification import Proposal


@dataclasses.dataclass(frozen=True)
class RandomDrafter:
    """Draws each guess from all ids alike.

    Attributes:
      vocab_size: the target's rows.
    """

    vocab_size: int

    def init(self, params: Params, inputs: Inputs, cache_length: int) -> None:
        """Nothing is kept."""

    def propose(
        self,
        params: Params,
        state: None,
        tokens: Int32[Array, "batch capacity"],
        positions: Int32[Array, " batch"],
        *,
        gamma: int,
        wanted: Int32[Array, " batch"],
        sampling: Sampling,
        keys: StepKeys,
    ) -> tuple[Proposal, None]:
        """See `BlockDrafter.propose`. Where all rows are greedy, q is not asked for and not built."""
        num_ids = jnp.asarray(self.vocab_size if sampling.num_ids is None else sampling.num_ids)
        guesses = jnp.floor(uniforms(keys, DRAW, gamma) * num_ids).astype(jnp.int32)
        guesses = jnp.minimum(guesses, num_ids - 1)  # a product may round up
        q = None
        if sampling.temperature is not None:
            uniform = jnp.where(jnp.arange(self.vocab_size) < num_ids, 1 / num_ids, 0).astype(jnp.float32)
            q = jnp.broadcast_to(uniform[None, None], (*guesses.shape, self.vocab_size))
        return Proposal(guesses, q, jnp.full(positions.shape, gamma, jnp.int32)), state
