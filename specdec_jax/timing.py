"""How long device work takes: compilation left out, waited for, interleaved, medians."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from specdec_jax.models.base import Cache, Decoder
from specdec_jax.types import Inputs, Params


class Timed(NamedTuple):
    """What a function returned, and its time in seconds, or the median of its times."""

    value: Any
    seconds: float


def timed(function: Callable[[], Any]) -> Timed:
    """Calls a function once and waits for what it returns."""
    start = time.perf_counter()
    value = jax.block_until_ready(function())
    return Timed(value, time.perf_counter() - start)


def interleaved(functions: Sequence[Callable[[], Any]], *, repeats: int) -> list[Timed]:
    """Times functions in turn, so that a change in the machine's speed meets all of them alike.

    Args:
      functions: each is called once first, which compiles it, then `repeats` times.
      repeats: timed calls of each.

    Returns:
      One Timed for each function, in order.

    Raises:
      ValueError: `repeats` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; it must be 1 or more.")
    for function in functions:
        jax.block_until_ready(function())
    rounds = [[timed(function) for function in functions] for _ in range(repeats)]
    return [
        Timed(calls[-1].value, statistics.median(call.seconds for call in calls)) for calls in zip(*rounds, strict=True)
    ]


class Call(NamedTuple):
    """A model and how many tokens one call of it takes."""

    model: Decoder
    params: Params
    num_tokens: int


def seconds_per_call(
    calls: Sequence[Call], inputs: Inputs, *, cache_length: int, repeats: int = 5, calls_per_loop: int = 32
) -> list[float]:
    """Times `extend` as decoding sees it: inside one jitted loop, each call depending on the one before.

    The ratio of two of these is the paper's c (Definition 3.7), or the cost of a block call.

    Args:
      calls: what to time.
      inputs: one batch, of the shape that decoding has.
      cache_length: slots of the caches, as in decoding.
      repeats: loops of each, interleaved; medians.
      calls_per_loop: calls in a loop.

    Returns:
      Seconds of one call, for each.
    """

    def loop(call: Call) -> Callable[[], Array]:
        cache, prompt, _ = _prefill(call.model, call.params, inputs, cache_length)
        tokens = jnp.broadcast_to(prompt[:, :1], (prompt.shape[0], call.num_tokens))
        return functools.partial(_loop, call.model, call.params, cache, tokens, cache_length, calls_per_loop)

    loops = interleaved([loop(call) for call in calls], repeats=repeats)
    return [timed_loop.seconds / calls_per_loop for timed_loop in loops]


@functools.partial(jax.jit, static_argnums=(0, 3))
def _prefill(model: Decoder, params: Params, inputs: Inputs, cache_length: int) -> tuple[Cache, Array, Array]:
    return model.prefill(params, inputs, cache_length)


@functools.partial(jax.jit, static_argnames=("model", "cache_length", "num_calls"))
def _loop(
    model: Decoder,
    params: Params,
    cache: Cache,
    tokens: Int32[Array, "batch k"],
    cache_length: int,
    num_calls: int,
) -> Float32[Array, " batch"]:
    places = cache_length - tokens.shape[1] + 1  # where a block fits

    def call(i: Array, carry: tuple) -> tuple:
        tokens, cache, total = carry
        positions = jnp.full(tokens.shape[:1], i % places, jnp.int32)
        logits, cache = model.extend(params, cache, tokens, positions)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache, total + logits[:, 0, 0]

    total = jnp.zeros(tokens.shape[:1], jnp.float32)
    return jax.lax.fori_loop(0, num_calls, call, (tokens, cache, total))[2]
