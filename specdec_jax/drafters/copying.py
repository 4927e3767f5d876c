"""Copies from the context (the paper's section 3.6): what followed, in the input or the output, on the newest tokens.

    input        move  the  file  to  the  trash  now
    output       please  move  the  file                  the longest run of its newest tokens that stands in the input
    guesses                              to  the  trash   is move the file; copied is what comes after it

Shallow Aggressive Decoding (Sun et al., arXiv 2106.04970) does so for corrections, where almost all is copied.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from specdec_jax.drafters.table import TableParams
from specdec_jax.sampling import Sampling, StepKeys
from specdec_jax.types import Inputs
from specdec_jax.verification import Proposal


class _Match(NamedTuple):
    """Where the newest tokens stand too: how many of them do, and the place of the last one in the context."""

    length: Int32[Array, " batch"]
    place: Int32[Array, " batch"]


@dataclasses.dataclass(frozen=True)
class CopyDrafter:
    """Copies what follows the longest match of the newest tokens; guesses are sure, q is a point mass.

    Without a match it guesses what a table has as the likeliest successor, and then that one's; without a table, its
    parameters being None, it drafts nothing.

    Attributes:
      longest: tokens of a match at most; longer ones count as this long.
      shortest: matches below this are none.
    """

    longest: int = 8
    shortest: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"shortest and longest are {self.shortest} and {self.longest}; give 1 <= shortest <= longest."
            )

    def init(
        self, params: TableParams | None, inputs: Inputs, cache_length: int
    ) -> Int32[Array, "batch length"] | None:
        """Keeps the encoder's input."""
        return inputs.encoder_tokens

    def propose(
        self,
        params: TableParams | None,
        state: Int32[Array, "batch length"] | None,
        tokens: Int32[Array, "batch capacity"],
        positions: Int32[Array, " batch"],
        *,
        gamma: int,
        wanted: Int32[Array, " batch"],
        sampling: Sampling,
        keys: StepKeys,
    ) -> tuple[Proposal, Int32[Array, "batch length"] | None]:
        """See `BlockDrafter.propose`."""
        ahead = jnp.arange(1, gamma + 1)[None]
        # In the output: the latest such place. The copy may run into itself, as in a rhythm: then it goes on with it.
        slots = jnp.arange(tokens.shape[1])[None]
        match = self._match(tokens, tokens, positions, may=slots < positions[:, None], prefer=slots)
        period = jnp.maximum(positions - match.place, 1)
        guesses = jnp.take_along_axis(tokens, match.place[:, None] + 1 + (ahead - 1) % period[:, None], axis=1)
        num_guesses = jnp.full_like(positions, gamma)
        length = match.length
        if state is not None:  # in the input: the place that is closest to as far in; it wins over one of equal length
            places = jnp.arange(state.shape[1])[None]
            follows = jnp.pad(state[:, 1:] != 0, ((0, 0), (0, 1)))
            of_input = self._match(state, tokens, positions, may=follows, prefer=-jnp.abs(places - positions[:, None]))
            window = of_input.place[:, None] + ahead
            copied = jnp.take_along_axis(state, window, axis=1, mode="fill", fill_value=0)
            wins = of_input.length >= match.length
            guesses = jnp.where(wins[:, None], copied, guesses)
            num_guesses = jnp.where(wins, jnp.sum(copied != 0, axis=1), num_guesses)
            length = jnp.maximum(length, of_input.length)
        found = length >= self.shortest
        # A match grows by every guess that is accepted, and a longer one is a safer one.
        confidence = 1 - 1 / (jnp.maximum(length, 1)[:, None] + ahead).astype(jnp.float32)
        if params is None:
            num_guesses = jnp.where(found, num_guesses, 0)
        else:
            likeliest, sure = _chain(params, tokens, positions, gamma)
            guesses = jnp.where(found[:, None], guesses, likeliest)
            confidence = jnp.where(found[:, None], confidence, sure)
            num_guesses = jnp.where(found, num_guesses, gamma)
        return Proposal(guesses, None, num_guesses.astype(jnp.int32), confidence), state

    def _match(
        self,
        context: Int32[Array, "batch places"],
        tokens: Int32[Array, "batch capacity"],
        positions: Int32[Array, " batch"],
        *,
        may: Bool[Array, "batch places"],
        prefer: Int32[Array, "#batch places"],
    ) -> _Match:
        """The longest match that ends where it `may`; of several, the most preferred."""
        goes_on, length = may, jnp.zeros(may.shape, jnp.int32)
        for back in range(self.longest):  # the start token is no word, and padding none either
            place = positions - back
            own = jnp.take_along_axis(tokens, jnp.maximum(place, 0)[:, None], axis=1)
            earlier = jnp.pad(context, ((0, 0), (back, 0)))[:, : context.shape[1]]
            goes_on = goes_on & (earlier == own) & (place > 0)[:, None] & (earlier != 0)
            length = length + goes_on
        most = jnp.max(length, axis=1)
        best = jnp.argmax(jnp.where(may & (length == most[:, None]), prefer, jnp.iinfo(jnp.int32).min), axis=1)
        return _Match(most, best.astype(jnp.int32))


def _chain(
    params: TableParams, tokens: Int32[Array, "batch capacity"], positions: Int32[Array, " batch"], gamma: int
) -> tuple[Int32[Array, "batch gamma"], Float32[Array, "batch gamma"]]:
    """The likeliest successor of each row's newest token, that one's, and so on; and how likely the table has each."""
    newest = jnp.take_along_axis(tokens, positions[:, None], axis=1)[:, 0]
    guesses, sure = [], []
    for _ in range(gamma):
        following = params.best[0, newest]
        guesses.append(following)
        own = jnp.sum(
            jnp.where(params.successors[0, newest] == following[:, None], params.probabilities[0, newest], 0), axis=-1
        )
        sure.append(own + params.rest[0, newest] * params.unigram[following])
        newest = following
    return jnp.stack(guesses, axis=1), jnp.stack(sure, axis=1)
