"""Weights in memory as a TPU's compiler wants them.

A matrix that lies in memory the wrong way round for the product that reads it is transposed first, in every call: half
of the time of verification with T5-XXL. So the compiler is asked once, for the speculative loop, how it would have the
weights, and they are laid out so. Every program that is compiled for them afterwards takes them as they are.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.layout import Format, Layout


def automatic(shardings: Any) -> Any:
    """Formats that leave the layout to the compiler; takes and returns a tree."""
    return jax.tree.map(lambda sharding: Format(Layout.AUTO, sharding), shardings)


def settle(run: Callable[..., Any], weights: Any, *rest: Any) -> Any:
    """Lays weights out as the compiler wants them for a program.

    Args:
      run: the program, of the weights and the rest.
      weights: arrays on devices; they are moved one at a time, and those that were given are gone.
      rest: its other arguments.

    Returns:
      The weights.
    """
    wanted = automatic(jax.tree.map(lambda x: x.sharding, weights))
    nothing = jax.tree.map(lambda x: None, rest)
    compiled = jax.jit(run, in_shardings=(wanted, *nothing)).lower(weights, *rest).compile()
    chosen = compiled.input_formats[0][0]
    return jax.tree.map(lambda x, where: jax.device_put(x, where, donate=True), weights, chosen)
