"""The axes and the few types that every part of the package shares.

Axis names used in shapes, everywhere:

  batch      rows decoded together; every row is independent of the others
  length     encoder positions, padded
  prefix     decoder tokens that are given, start token excluded, padded on the right
  capacity   slots of a cache and of the token history; slot i belongs to position i
  k          tokens of one decoder call (1, 2 or gamma + 1)
  gamma      guesses per step (the paper's gamma)
  vocab      rows of the embedding, padded ids included
  heads, head_dim, emb, mlp   the model's own sizes

A *position* is absolute: the start token has position 0. Arrays of token ids and positions are int32.
"""

from typing import Any, NamedTuple, TypeAlias

from jaxtyping import Array, Int32

Params: TypeAlias = Any
"""A nested dict of arrays, named as T5X names them."""


class Inputs(NamedTuple):
    """What a model decodes from.

    Attributes:
      encoder_tokens: int32 [batch, length], 0 is padding; None for a model without an encoder.
      prefix: int32 [batch, prefix], decoder tokens that the output has to go on from, padded with 0 on the right; None
        for no prefix.
    """

    encoder_tokens: Int32[Array, "batch length"] | None
    prefix: Int32[Array, "batch prefix"] | None = None

    @property
    def prefix_length(self) -> int:
        """Static width of the prefix; 0 without one."""
        return 0 if self.prefix is None else self.prefix.shape[1]
