"""The one interface of every model that can be a target or a draft."""

from typing import Any, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Array, Float32, Int32

from specdec_jax.types import Inputs, Params

Cache: TypeAlias = Any
"""A model's own pytree. It has no index: the position given to `extend` is the only one there is."""


@runtime_checkable
class Decoder(Protocol):
    """A model that can be decoded from.

    Implementations are hashable, because the decoding functions take them as static arguments.

    **Roll-back is using a smaller position.** `extend` writes the keys and values of its k tokens at `positions`,
    `positions + 1`, ..., and a query sees the slots up to its own position only. What a rejected guess left behind is
    overwritten before any query can see it:

        positions        0   1   2   3   4   5
        after a step     a   b   c   x   x   .      two guesses (x) were rejected
        next call at 3   a   b   c   d   e   f      writes 3, 4, 5; the query at 3 sees 0..3
    """

    @property
    def vocab_size(self) -> int:
        """Width of the logits, padded ids included."""
        ...

    def prefill(
        self, params: Params, inputs: Inputs, cache_length: int
    ) -> tuple[Cache, Int32[Array, "batch prompt"], Int32[Array, " batch"]]:
        """Runs whatever is run once per input: the encoder, cross-attention's keys and values, the prefix.

        Args:
          params: the model's parameters.
          inputs: what to decode from.
          cache_length: slots to allocate. A slice that starts too late is clamped silently by XLA, so this must be at
            least the prefix length + max_length + gamma + 1.

        Returns:
          The cache; the prompt int32 [batch, prefix + 1], which is the start token and the prefix; and each row's
          position int32 [batch]: decoding goes on from `prompt[b, position[b]]`, whose keys are not cached yet.
        """
        ...

    def extend(
        self,
        params: Params,
        cache: Cache,
        tokens: Int32[Array, "batch k"],
        positions: Int32[Array, " batch"],
    ) -> tuple[Float32[Array, "batch k vocab"], Cache]:
        """Runs k tokens per row, the first one at the row's own position.

        Returns:
          logits: float32 [batch, k, vocab]; [b, i] is about the token after tokens[b, i].
          The cache with the k keys and values written.
        """
        ...
