"""What a T5 keeps between calls, and how new slots are written into it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.linen.spmd import with_logical_constraint
from jaxtyping import Array, Bool, Float, Int32

from specdec_jax.models.layers import SLOT_AXES
from specdec_jax.writing import write


class T5Cache(NamedTuple):
    """What a T5 keeps between calls.

    Attributes:
      keys: per layer, [batch, heads, capacity, head_dim]; slot i belongs to position i.
      values: likewise.
      cross_keys: per layer, [batch, heads, length, head_dim], of the encoder's output.
      cross_values: likewise.
      encoder_mask: bool [batch, length], False where the encoder input is padding.
    """

    keys: tuple[Float[Array, "batch heads capacity head_dim"], ...]
    values: tuple[Float[Array, "batch heads capacity head_dim"], ...]
    cross_keys: tuple[Float[Array, "batch heads length head_dim"], ...]
    cross_values: tuple[Float[Array, "batch heads length head_dim"], ...]
    encoder_mask: Bool[Array, "batch length"]


_FEW_SLOTS = 4


def write_slots(
    cache: Float[Array, "batch heads capacity head_dim"],
    update: Float[Array, "batch heads k head_dim"],
    positions: Int32[Array, " rows"],
) -> Float[Array, "batch heads capacity head_dim"]:
    """Overwrites k slots per row from the row's own position on; `positions` has batch entries, or one for all.

    On a TPU a product with ones and zeros puts more than a few entries in their slots, since k comparisons of every
    slot take longer. It rounds them as the products that read them do, so once. NaN spreads to the row's new slots.
    """
    if cache.shape[2] == 0:  # teacher forcing keeps nothing
        return cache
    by_slot = functools.partial(write, axis=2)
    if positions.shape[0] == 1 or update.shape[2] <= _FEW_SLOTS:
        written = by_slot(cache, update, positions)
    else:
        written = jax.lax.platform_dependent(cache, update, positions, tpu=_by_products, default=by_slot)
    return with_logical_constraint(written, SLOT_AXES)


def _by_products(cache: Array, update: Array, positions: Array) -> Array:
    places = jnp.arange(cache.shape[2])[None] - positions[:, None]
    num = update.shape[2]
    own = places[:, None] == jnp.arange(num)[None, :, None]  # [batch, k, capacity]
    placed = jnp.einsum("bkt,bhkd->bhtd", own.astype(cache.dtype), update.astype(cache.dtype))
    inside = (places >= 0) & (places < num)
    return jnp.where(inside[:, None, :, None], placed, cache)
