"""alpha by Corollary 3.6: the mean of sum_x min(p, q) over tokens that the target generated.

Both models see the target's own outputs by teacher forcing, and go through the same constraints and the same
standardizing as in decoding. The paper takes the betas as independent and of equal law; their distribution, and alpha
by position, show how far that holds.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from specdec_jax import verification
from specdec_jax.comparison import forced_logits
from specdec_jax.generation import Batch, Pair
from specdec_jax.models.t5 import T5
from specdec_jax.results import DecodingResult
from specdec_jax.sampling import PointMass, Sampling, to_probabilities
from specdec_jax.sharding import Sharded, fetch
from specdec_jax.types import Params
from specdec_jax.verification import Proposal, Target

NUM_BINS = 20
"""Bins of the distribution of beta."""


class Range(NamedTuple):
    """Acceptance at some positions of an output, which count from 1."""

    first: int
    last: int
    alpha: float
    alpha_error: float | None
    num_tokens: int


class Acceptance(NamedTuple):
    """How well a draft agrees with its target on what the target says.

    Attributes:
      num_tokens: tokens that the target generated, ends included.
      num_outputs: outputs that they are from.
      alpha: the mean of beta.
      alpha_error: its standard error; betas of one input depend on each other, inputs do not. None of a single one.
      by_position: the same by position in the output.
      histogram: shares of betas in 20 bins of equal width from 0 to 1.
      lenience: the mean of sum_x min(p / l, q) for each l, by str(l) (appendix A.5).
    """

    num_tokens: int
    num_outputs: int
    alpha: float
    alpha_error: float | None
    by_position: list[Range]
    histogram: list[float]
    lenience: dict[str, float]


def measure(
    pair: Pair,
    batches: Sequence[Batch],
    results: Sequence[DecodingResult],
    leniences: Sequence[float],
    *,
    num_inputs: int,
) -> Acceptance:
    """Runs both models over the target's outputs.

    Args:
      pair: the models.
      batches: what was decoded.
      results: per batch, what the target alone made of it, numpy; of rows that only fill a batch nothing is taken.
      leniences: for which to compute alpha(l) too.
      num_inputs: after so many outputs the inputs are the same again.

    Raises:
      ValueError: there is no output token.
    """
    betas, inside = [], []
    for batch, result in zip(batches, results, strict=True):
        rows, places = batch.num_rows, np.arange(result.tokens.shape[1])
        tokens, all_leniences = jnp.asarray(result.tokens), jnp.asarray([1.0, *leniences], jnp.float32)
        found = _betas(*pair[:4], batch, tokens, pair.vocabulary.eos_id, all_leniences)
        betas.append(np.clip(np.asarray(fetch(found), np.float64)[:, :rows], 0, 1))  # a float32 sum may round above 1
        inside.append(places[None] < result.lengths[:rows, None])
    if not any(one.any() for one in inside):
        raise ValueError("the target emitted no token; there is nothing to measure alpha on.")
    beta, counts = np.concatenate(betas, axis=1), np.concatenate(inside, axis=0)
    alpha, error = mean_and_error(beta[0], counts, num_inputs)
    return Acceptance(
        num_tokens=int(counts.sum()),
        num_outputs=len(counts),
        alpha=alpha,
        alpha_error=error,
        by_position=_by_position(beta[0], counts, num_inputs),
        histogram=(np.histogram(beta[0][counts], bins=NUM_BINS, range=(0, 1))[0] / counts.sum()).tolist(),
        lenience={
            str(float(x)): mean_and_error(b, counts, num_inputs)[0] for x, b in zip(leniences, beta[1:], strict=True)
        },
    )


def mean_and_error(
    beta: Float32[np.ndarray, "outputs length"] | np.ndarray, inside: np.ndarray, num_inputs: int
) -> tuple[float, float | None]:
    """The mean over tokens, and its standard error if inputs are independent (a ratio of two sums over inputs).

    Outputs of the same input, which are num_inputs apart, are alike, and count as one. Of a single input there is no
    error to be told.
    """
    group = np.arange(len(beta)) % num_inputs
    counts = np.bincount(group, inside.sum(axis=1))
    sums = np.bincount(group, np.where(inside, beta, 0.0).sum(axis=1))
    mean, n = sums.sum() / counts.sum(), int((counts > 0).sum())
    if n == 1:
        return float(mean), None
    spread = np.sum((sums - mean * counts) ** 2) * n / (n - 1)
    return float(mean), float(np.sqrt(spread) / counts.sum())


def _by_position(beta: np.ndarray, inside: np.ndarray, num_inputs: int) -> list[Range]:
    """Positions 1, 2, 3 to 4, 5 to 8 and so on."""
    ranges, first, width = [], 1, 1
    while first <= beta.shape[1]:
        last = min(first + width - 1, beta.shape[1])
        part = slice(first - 1, last)
        if inside[:, part].any():
            mean, error = mean_and_error(beta[:, part], inside[:, part], num_inputs)
            ranges.append(Range(first, last, mean, error, int(inside[:, part].sum())))
        first, width = last + 1, last
    return ranges


@functools.partial(jax.jit, static_argnames=("target", "draft", "eos_id"))
def _betas(
    target: T5 | Sharded,
    target_params: Params,
    draft: T5 | Sharded,
    draft_params: Params,
    batch: Batch,
    tokens: Int32[Array, "batch max_length"],
    eos_id: int,
    leniences: Float32[Array, " leniences"],
) -> Float32[Array, "leniences batch max_length"]:
    """Beta at each place of an output; at temperature 0 whether the draft's choice is accepted."""
    encoder_tokens, sampling = batch.inputs.encoder_tokens, batch.sampling
    assert encoder_tokens is not None
    prefixes = jnp.pad(
        tokens, ((0, 0), (1, 0)), constant_values=target.config.start_id
    )  # one more than places: gamma + 1

    def logits(model: T5 | Sharded, params: Params, some: Sampling) -> Array:
        return forced_logits(model, params, encoder_tokens, prefixes, some, eos_id)

    target_logits = logits(target, target_params, sampling)
    greedy = sampling.greedy_rows(tokens.shape[0])
    said = Target(to_probabilities(target_logits, sampling), target_logits, greedy)
    draft_logits = logits(draft, draft_params, batch.draft_sampling)[:, :-1]
    q = to_probabilities(draft_logits, batch.draft_sampling)
    everything = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    guesses = Proposal(q.tokens, None, everything) if isinstance(q, PointMass) else Proposal(tokens, q, everything)
    return jax.lax.map(functools.partial(verification.beta, said, guesses), leniences)
