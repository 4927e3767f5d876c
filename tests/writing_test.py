"""Both ways to write into rows put the same entries in the same places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import writing
from specdec_jax.models import t5_cache


@pytest.mark.parametrize(
    ("shape", "axis", "entries"), [((3, 9), 1, 1), ((3, 9), 1, 4), ((3, 2, 9, 5), 2, 3), ((3, 9, 4), 1, 9)]
)
def test_all_ways_write_alike(shape, axis, entries):
    rng = np.random.default_rng(0)
    buffer = rng.normal(size=shape).astype(np.float32)
    values = rng.normal(size=[*shape[:axis], entries, *shape[axis + 1 :]]).astype(np.float32)
    starts = np.asarray([0, 9 - entries, (9 - entries) // 2], np.int32)
    expected = np.moveaxis(buffer.copy(), axis, 1)
    for row, start in enumerate(starts):
        expected[row, start : start + entries] = np.moveaxis(values, axis, 1)[row]
    expected = np.moveaxis(expected, 1, axis)
    for how in (writing.write, writing._by_slices, writing._by_selects):
        found = jax.jit(how, static_argnames="axis")(jnp.asarray(buffer), jnp.asarray(values), starts, axis=axis)
        np.testing.assert_array_equal(found, expected)
    for start in set(starts.tolist()):  # one for all rows
        one = writing.write(jnp.asarray(buffer), jnp.asarray(values), jnp.asarray([start]), axis=axis)
        all_rows = writing._by_selects(jnp.asarray(buffer), jnp.asarray(values), jnp.full(3, start), axis=axis)
        np.testing.assert_array_equal(one, all_rows)


def test_entries_are_written_in_the_type_of_the_buffer():
    found = writing.write(jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 1)), jnp.asarray([0, 2]))
    assert found.dtype == jnp.int32 and found.tolist() == [[1, 0, 0], [0, 0, 1]]


def test_slots_of_a_cache_by_products():
    rng = np.random.default_rng(1)
    positions = jnp.asarray([0, 4, 2], jnp.int32)
    for dtype in (jnp.float32, jnp.bfloat16):
        cache = jnp.asarray(rng.normal(size=(3, 2, 9, 5)), dtype)
        update = jnp.asarray(rng.normal(size=(3, 2, 5, 5)), dtype)
        expected = writing.write(cache, update, positions, axis=2)
        np.testing.assert_array_equal(t5_cache.write_slots(cache, update, positions), expected)
        np.testing.assert_array_equal(t5_cache._by_products(cache, update, positions), expected)
