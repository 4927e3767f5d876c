"""Two drafters as one: q is the mixture of theirs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from specdec_jax.drafters.base import BlockDrafter, Drafter, DrafterState
from specdec_jax.sampling import PointMass
from specdec_jax.types import Inputs, Params


@dataclasses.dataclass(frozen=True)
class MixtureDrafter:
    """Guesses by weight * q_first + (1 - weight) * q_second, before temperature and filters.

    Its parameters are the pair of theirs.

    Attributes:
      first: one drafter.
      second: the other; both of the kind that is asked for one guess at a time.
      weight: of the first, 0 to 1.
      vocab_size: the target's rows.
    """

    first: Drafter | BlockDrafter
    second: Drafter | BlockDrafter
    weight: float
    vocab_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight is {self.weight}; it must be 0 to 1.")
        for name in ("first", "second"):
            if not isinstance(getattr(self, name), Drafter):
                raise ValueError(
                    f"{name} is {type(getattr(self, name)).__name__}, which proposes blocks; a mixture is of drafters "
                    "with step()."
                )

    def init(self, params: tuple[Params, Params], inputs: Inputs, cache_length: int) -> tuple[Any, Any]:
        """See `Drafter.init`."""
        first, second = params
        return self.first.init(first, inputs, cache_length), self.second.init(second, inputs, cache_length)

    def step(
        self,
        params: tuple[Params, Params],
        state: tuple[DrafterState, DrafterState],
        tokens: Int32[Array, "batch capacity"],
        positions: Int32[Array, " batch"],
        *,
        first: bool,
    ) -> tuple[Float32[Array, "batch vocab"], tuple[DrafterState, DrafterState]]:
        """See `Drafter.step`."""
        assert isinstance(self.first, Drafter)
        assert isinstance(self.second, Drafter)
        one, state_one = self.first.step(params[0], state[0], tokens, positions, first=first)
        two, state_two = self.second.step(params[1], state[1], tokens, positions, first=first)
        for said in (one, two):
            if not isinstance(said, PointMass) and said.shape[-1] != self.vocab_size:
                raise ValueError(
                    f"a drafter of the mixture has a vocabulary of {said.shape[-1]} ids and the target one of "
                    f"{self.vocab_size}; use two with the same vocabulary."
                )
        mixed = self.weight * self._law(one) + (1 - self.weight) * self._law(two)
        return jnp.log(mixed), (state_one, state_two)

    def _law(self, said: Float32[Array, "batch vocab"] | PointMass) -> Float32[Array, "batch vocab"]:
        if isinstance(said, PointMass):
            return jax.nn.one_hot(said.tokens[:, 0], self.vocab_size)
        return jax.nn.softmax(said)
