"""Rules that look at what was decoded so far, or at single ids, and change logits before they become probabilities.

Each takes logits [batch, k, vocab] whose query i is about the token after slot `positions + i` of the history, and sees
slots 0 to `positions + i`: the earlier guesses of a block count as if they had been emitted.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

Logits = Float32[Array, "batch k vocab"]
Tokens = Int32[Array, "batch capacity"]
PerRowInt = Int32[Array, " batch"]


def penalize_repetition(
    logits: Logits, tokens: Tokens, positions: PerRowInt, penalty: Float32[Array, " batch"]
) -> Logits:
    """Divides positive and multiplies negative logits of ids that came before (CTRL, arXiv 1909.05858)."""
    factor = penalty[:, None, None]
    return jnp.where(_seen(logits, tokens, positions), jnp.where(logits > 0, logits / factor, logits * factor), logits)


def _seen(logits: Logits, tokens: Tokens, positions: PerRowInt) -> Bool[Array, "batch k vocab"]:
    """Whether an id is in the history that a query sees."""
    batch, k, vocab = logits.shape
    slots = jnp.arange(tokens.shape[1])[None]
    emitted = jnp.where(slots <= positions[:, None], tokens, vocab)  # `vocab` is dropped
    before = jnp.zeros((batch, vocab), bool).at[jnp.arange(batch)[:, None], emitted].set(True, mode="drop")
    if k == 1:
        return before[:, None]
    guesses = jnp.take_along_axis(tokens, positions[:, None] + jnp.arange(1, k)[None], axis=1)
    guessed = jnp.cumsum(jax.nn.one_hot(guesses, vocab, dtype=jnp.int32), axis=1) > 0
    return before[:, None] | jnp.pad(guessed, ((0, 0), (1, 0), (0, 0)))


def ban_repeated_ngrams(logits: Logits, tokens: Tokens, positions: PerRowInt, size: PerRowInt) -> Logits:
    """Forbids an id that would end a run of `size` tokens that is in the history already; 0 forbids nothing.

    With size 3 and a history of a b c d a b, c is forbidden: the run a b c would come again.
    """
    batch, k, vocab = logits.shape
    capacity = tokens.shape[1]
    newest = positions[:, None] + jnp.arange(k)[None]
    slots = jnp.arange(capacity)

    def compare(back: Array, banned: Array) -> Array:
        """Keeps a slot banned if the token `back` places before it equals the one as far before the new token."""
        there = slots - 1 - back
        here = newest - back
        old = jnp.take(tokens, jnp.maximum(there, 0), axis=1)[:, None]
        new = jnp.take_along_axis(tokens, jnp.maximum(here, 0), axis=1)[..., None]
        same = (old == new) & (there >= 0)[None, None] & (here >= 0)[..., None]
        return banned & (same | (back >= size - 1)[:, None, None])

    banned = (slots[None, None] <= newest[..., None]) & (size > 0)[:, None, None]
    banned = jax.lax.fori_loop(0, jnp.max(size) - 1, compare, banned)
    ids = jnp.where(banned, tokens[:, None], vocab)  # `vocab` is dropped
    rows, queries = jnp.arange(batch)[:, None, None], jnp.arange(k)[None, :, None]
    return jnp.where(jnp.zeros(logits.shape, bool).at[rows, queries, ids].set(True, mode="drop"), -jnp.inf, logits)


def forbid(logits: Logits, ids: Int32[Array, " n"]) -> Logits:
    """Forbids ids everywhere."""
    return jnp.where(_is_among(logits, ids), -jnp.inf, logits)


def forbid_before(logits: Logits, ids: Int32[Array, " n"], positions: PerRowInt, first: PerRowInt) -> Logits:
    """Forbids ids in every slot of a row before its slot `first`."""
    early = positions[:, None] + 1 + jnp.arange(logits.shape[1])[None] < first[:, None]
    return jnp.where(early[..., None] & _is_among(logits, ids), -jnp.inf, logits)


def _is_among(logits: Logits, ids: Int32[Array, " n"]) -> Bool[Array, "1 1 vocab"]:
    return jnp.zeros(logits.shape[-1], bool).at[ids].set(True, mode="drop")[None, None]
