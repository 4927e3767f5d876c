"""Drafters that are tables: c is next to nothing, and alpha is small (the paper's section 3.6)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from specdec_jax.drafters.table import TableParams
from specdec_jax.types import Inputs


@dataclasses.dataclass(frozen=True)
class UnigramDrafter:
    """How frequent each token is, whatever came before it; its parameters are a table's."""

    def init(self, params: TableParams, inputs: Inputs, cache_length: int) -> None:
        """Nothing is kept."""

    def step(
        self,
        params: TableParams,
        state: None,
        tokens: Int32[Array, "batch capacity"],
        positions: Int32[Array, " batch"],
        *,
        first: bool,
    ) -> tuple[Float32[Array, "batch vocab"], None]:
        """See `Drafter.step`."""
        return jnp.broadcast_to(jnp.log(params.unigram)[None], (len(tokens), len(params.unigram))), state


@dataclasses.dataclass(frozen=True)
class BigramDrafter:
    """What followed the newest token before; its parameters are a table's."""

    def init(self, params: TableParams, inputs: Inputs, cache_length: int) -> None:
        """Nothing is kept."""

    def step(
        self,
        params: TableParams,
        state: None,
        tokens: Int32[Array, "batch capacity"],
        positions: Int32[Array, " batch"],
        *,
        first: bool,
    ) -> tuple[Float32[Array, "batch vocab"], None]:
        """See `Drafter.step`. A dense row, out of the few ids that it has of its own and the unigram."""
        newest = jnp.take_along_axis(tokens, positions[:, None], axis=1)[:, 0]
        return jnp.log(successors(params, newest, 1)), state


def successors(params: TableParams, tokens: Int32[Array, " batch"], distance: int) -> Float32[Array, "batch vocab"]:
    """The law of the token that many places behind each token; rows sum to 1, and no valid id has probability 0."""
    place = (distance - 1, tokens)
    dense = params.rest[place][:, None] * params.unigram[None]
    return dense.at[jnp.arange(len(tokens))[:, None], params.successors[place]].add(params.probabilities[place])
