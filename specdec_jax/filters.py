"""Which ids the filters of top_k and top_p keep, without sorting the vocabulary.

Floats are taken as unsigned integers in the same order; the threshold that keeps enough is found bit by bit, from the
highest on, with one pass over the vocabulary for each of the 32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32


def keep_top_k(logits: Float32[Array, "batch k vocab"], top_k: Int32[Array, "batch 1"]) -> Bool[Array, "batch k vocab"]:
    """The top_k largest; ties at the last place go to the lowest ids."""
    vocab = logits.shape[-1]
    wanted = jnp.where(top_k == 0, vocab, jnp.minimum(top_k, vocab))
    order = _ordered_bits(logits)
    threshold = _threshold(order, jnp.ones_like(logits, jnp.int32), jnp.broadcast_to(wanted, logits.shape[:2]))
    above = jnp.sum(order > threshold[..., None], axis=-1)
    return _keep(order, threshold, wanted - above)


def keep_top_p(
    logits: Float32[Array, "batch k vocab"], top_p: Float32[Array, "batch 1"]
) -> Bool[Array, "batch k vocab"]:
    """The fewest ids whose probabilities reach top_p; ties at the last place go to the lowest ids."""
    weight = jnp.exp(logits)
    order = _ordered_bits(logits)
    wanted = top_p * jnp.sum(weight, axis=-1)
    threshold = _threshold(order, weight, wanted)
    at_threshold = jnp.max(jnp.where(order == threshold[..., None], weight, 0.0), axis=-1)
    above = jnp.sum(jnp.where(order > threshold[..., None], weight, 0.0), axis=-1)
    missing = jnp.ceil((wanted - above) / jnp.where(at_threshold > 0, at_threshold, 1.0))
    keep = _keep(order, threshold, jnp.maximum(missing, 1.0).astype(jnp.int32))
    return keep | (top_p == 1.0)[..., None]


def _ordered_bits(x: Float32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Unsigned integers in the order of the floats (-0.0 taken as 0.0)."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(order: UInt32[Array, "batch k vocab"], weight: Array, wanted: Array) -> UInt32[Array, "batch k"]:
    """The largest threshold at and above which the weights sum to at least `wanted`, one bit per pass."""

    def set_bit(i: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        total = jnp.sum(jnp.where(order >= candidate[..., None], weight, 0), axis=-1)
        return jnp.where(total >= wanted, candidate, threshold)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(order.shape[:-1], jnp.uint32))


def _keep(
    order: UInt32[Array, "batch k vocab"], threshold: UInt32[Array, "batch k"], num_ties: Int32[Array, "batch k"]
) -> Bool[Array, "batch k vocab"]:
    """What is above the threshold, and the first `num_ties` of what is equal to it."""
    tied = order == threshold[..., None]
    # Counting ties along the vocabulary is slow, and without surplus ties not needed.
    surplus = jnp.any(jnp.sum(tied, axis=-1) > num_ties)
    first = jax.lax.cond(
        surplus,
        lambda: tied & (jnp.cumsum(tied, axis=-1) <= num_ties[..., None]),
        lambda: tied,
    )
    return (order > threshold[..., None]) | first
