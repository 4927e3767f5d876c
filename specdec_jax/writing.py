"""Writing a few entries into each row of an array, from a place of the row's own on."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

_MOST_SELECTS = 32


def write(buffer: Array, values: Array, starts: Int32[Array, " rows"], *, axis: int = 1) -> Array:
    """Overwrites entries of each row with values, from the row's own start on; rows are axis 0.

    TPU's compiler makes a loop over the rows of it, some microseconds for each. There a few entries are put in place by
    comparing every place with theirs, all rows at once.

    Args:
      buffer: [batch, ..., size, ...], to write into.
      values: like it, with the number of entries that are written along the axis.
      starts: first place of each row's, or one for all; a row's entries have to fit behind it.
      axis: along which entries lie; 1 or more.
    """
    values = values.astype(buffer.dtype)
    if starts.shape[0] == 1:
        return jax.lax.dynamic_update_slice_in_dim(buffer, values, starts[0], axis)

    by_slices, by_selects = (functools.partial(how, axis=axis) for how in (_by_slices, _by_selects))
    if values.shape[axis] > _MOST_SELECTS:
        return by_slices(buffer, values, starts)
    return jax.lax.platform_dependent(buffer, values, starts, tpu=by_selects, default=by_slices)


def _by_slices(buffer: Array, values: Array, starts: Array, *, axis: int) -> Array:
    return jax.vmap(lambda row, new, start: jax.lax.dynamic_update_slice_in_dim(row, new, start, axis - 1))(
        buffer, values, starts
    )


def _by_selects(buffer: Array, values: Array, starts: Array, *, axis: int) -> Array:
    places = jax.lax.broadcasted_iota(jnp.int32, buffer.shape, axis)
    own = jnp.expand_dims(starts, range(1, buffer.ndim))
    for i in range(values.shape[axis]):
        new = jax.lax.slice_in_dim(values, i, i + 1, axis=axis)
        buffer = jnp.where(places == own + i, new, buffer)
    return buffer
