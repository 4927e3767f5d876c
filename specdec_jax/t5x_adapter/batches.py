"""From t5x's batches to rows of the decoding loop and back; nothing here needs t5x."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from specdec_jax.results import DecodingResult, FinishReason

_LEAST = -1e7


def choose_rng(rng: Array | None, decode_rng: Array | None) -> Array:
    """The one key that was given; t5x's default where none was."""
    if rng is not None and decode_rng is not None:
        raise ValueError("rng and decoder_params['decode_rng'] are both given; give one of them.")
    chosen = decode_rng if rng is None else rng
    return jax.random.PRNGKey(0) if chosen is None else chosen


def seeds(rng: Array, seed: int, rows: int) -> Int32[Array, " rows"]:
    """A seed for each row: of this batch's key, which is the same in every launch, and the user's own seed.

    t5x tells a row's place in its batch, not which input it is. So a sample comes again only with the same batch size,
    the same chunks and the same number of hosts; and launches of other shards of a task need seeds of their own.
    """
    bits = jax.random.bits(jax.random.fold_in(rng, seed), (rows,), jnp.uint32)
    return (bits >> 1).astype(jnp.int32)


def repeat(x: Array | None, num_decodes: int) -> Array | None:
    """[batch, length] -> [batch * num_decodes, length], the decodes of an input side by side."""
    return None if x is None else jnp.repeat(x.astype(jnp.int32), num_decodes, axis=0)


def read_prompt(decoder_input_tokens: Int32[Array, "batch length"], eos_id: int) -> Int32[Array, "batch prefix"]:
    """The decoder input behind its start token, up to its first end or padding, the rest 0.

    decoder_input_tokens  0  5  6  1  0    (1 is the end)
    prompt                   5  6  0  0
    """
    prompt = decoder_input_tokens[:, 1:]
    given = jnp.cumprod((prompt != 0) & (prompt != eos_id), axis=1)
    return prompt * given.astype(prompt.dtype)


def prompt_lengths(prompt: Int32[Array, "rows prefix"] | None, rows: int) -> Int32[Array, " rows"]:
    """Tokens of each row's prompt."""
    return jnp.zeros((rows,), jnp.int32) if prompt is None else jnp.sum(prompt > 0, axis=1, dtype=jnp.int32)


def limits(
    prompt: Int32[Array, "rows prefix"] | None, rows: int, length: int, most_steps: int
) -> Int32[Array, " rows"]:
    """Tokens that each row may emit: prompt and output together fill `length`."""
    return jnp.minimum(length - prompt_lengths(prompt, rows), most_steps)


def read_result(
    result: DecodingResult, prompt: Int32[Array, "rows prefix"] | None, num_decodes: int, rescale_log_probs: bool
) -> tuple[Int32[Array, "batch num_decodes length"], dict[str, Array]]:
    """Tokens, with the prompt before them, and what is told of them, both sorted by score, the best last.

    Rows that ended at NaN are first, whatever their scores. A token that lenience let pass where it has probability 0
    counts as -1e7, t5x's own stand-in for minus infinity, which JSON does not know.
    """
    rows, length = result.tokens.shape
    tokens = result.tokens
    if prompt is not None:
        given = prompt_lengths(prompt, rows)[:, None]
        places = jnp.arange(length)[None]
        emitted = jnp.take_along_axis(tokens, jnp.clip(places - given, 0, length - 1), axis=1)
        tokens = jnp.where(places < given, jnp.pad(prompt, ((0, 0), (0, 1))), emitted)
    per_token = result.standardized_scores if rescale_log_probs else result.scores
    aux = {
        "scores": jnp.sum(jnp.maximum(per_token, _LEAST), axis=1),
        "num_tokens": result.lengths,
        "num_target_calls": result.num_target_calls,
        "accepted": result.accepted,
        "drafted": result.drafted,
        "trials": result.trials,
        "alpha": result.alpha,
        "finish_reason": result.finish_reason,
    }
    batch = rows // num_decodes
    rank = jnp.where(aux["finish_reason"] == FinishReason.NAN, -jnp.inf, aux["scores"])
    order = jnp.argsort(rank.reshape(batch, num_decodes), axis=1)
    aux = {name: jnp.take_along_axis(x.reshape(batch, num_decodes), order, axis=1) for name, x in aux.items()}
    return jnp.take_along_axis(tokens.reshape(batch, num_decodes, length), order[..., None], axis=1), aux
