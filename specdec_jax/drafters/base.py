"""What guesses: the two forms of a drafter. Standardizing, drawing, stopping and EOS are decoding.py's.

One of your own is a class like this one, which guesses that what was said before will be said again. It can be wrong
as often as it likes: outputs stay what they are.

    @dataclasses.dataclass(frozen=True)  # hashable, since it is a static argument
    class RepeatDrafter:
        back: int  # how far back

        def init(self, params, inputs, cache_length):
            return None  # its state: a pytree of fixed shapes, or nothing

        def step(self, params, state, tokens, positions, *, first):
            place = jnp.maximum(positions - self.back + 1, 0)
            return PointMass(jnp.take_along_axis(tokens, place[:, None], axis=1)), state

    speculative_decode(target, target_params, RepeatDrafter(4), None, inputs, ...)
"""

from typing import Any, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Array, Float32, Int32

from specdec_jax.sampling import PointMass, Sampling, StepKeys
from specdec_jax.types import Inputs, Params
from specdec_jax.verification import Proposal

DrafterState: TypeAlias = Any
"""A drafter's own pytree of fixed shapes."""


@runtime_checkable
class Drafter(Protocol):
    """A drafter that is asked for one guess at a time. Hashable, since it is a static argument."""

    def init(self, params: Params, inputs: Inputs, cache_length: int) -> DrafterState:
        """Runs once per input; see `Decoder.prefill` for the arguments."""
        ...

    def step(
        self,
        params: Params,
        state: DrafterState,
        tokens: Int32[Array, "batch capacity"],
        positions: Int32[Array, " batch"],
        *,
        first: bool,
    ) -> tuple[Float32[Array, "batch vocab"] | PointMass, DrafterState]:
        """Says what may come after each row's newest token.

        Args:
          params: the drafter's parameters.
          state: its state.
          tokens: int32 [batch, capacity], the history, earlier guesses of this step included.
          positions: int32 [batch], where the newest token is: tokens[b, positions[b]].
          first: the first call of a step. Of the history before it, the newest two tokens may not have been shown to
            the drafter, since the last step's last guess and its extra token never were.

        Returns:
          Raw logits float32 [batch, vocab], or a PointMass with tokens [batch, 1] where the drafter is sure of one id.
        """
        ...


@runtime_checkable
class BlockDrafter(Protocol):
    """A drafter that proposes a whole block at once, and may propose fewer than gamma guesses for a row."""

    def init(self, params: Params, inputs: Inputs, cache_length: int) -> DrafterState:
        """Runs once per input."""
        ...

    def propose(
        self,
        params: Params,
        state: DrafterState,
        tokens: Int32[Array, "batch capacity"],
        positions: Int32[Array, " batch"],
        *,
        gamma: int,
        wanted: Int32[Array, " batch"],
        sampling: Sampling,
        keys: StepKeys,
    ) -> tuple[Proposal, DrafterState]:
        """Proposes up to gamma guesses; q must be the very law that they were drawn from.

        `wanted` tells for how many guesses each row has a use, gamma or fewer, by its past; with adaptive gamma
        a row that has ended wants 0. A drafter to which guesses come dear may stop there, all others need not look.

        Slots of the history behind `positions` hold what earlier steps left there, and are not to be read.
        """
        ...
