"""How long device work takes: compilation left out, waited for, interleaved, medians."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax


class Timed(NamedTuple):
    """What a function returned, and its time in seconds, or the median of its times, with all of them."""

    value: Any
    seconds: float
    all_seconds: tuple[float, ...] = ()


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
    times = [tuple(call.seconds for call in calls) for calls in zip(*rounds, strict=True)]
    return [Timed(last.value, statistics.median(all_), all_) for last, all_ in zip(rounds[-1], times, strict=True)]
