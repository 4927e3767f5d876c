"""alpha by Corollary 3.6: the mean of sum_x min(p, q) over tokens that the target generated.

Both models see the target's own outputs by teacher forcing, and go through the same constraints and the same
standardizing as in decoding. The paper takes the betas as independent and of equal law; their distribution, and alpha
by position, show how far that holds.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from specdec_jax import verification
from specdec_jax.adaptation import look, make_adaptation
from specdec_jax.comparison import forced_logits
from specdec_jax.drafters.base import BlockDrafter, Drafter
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafting import Adaptive, propose
from specdec_jax.generation import Batch, Pair
from specdec_jax.models.t5 import T5
from specdec_jax.results import DecodingResult
from specdec_jax.sampling import End, PointMass, row_keys, to_probabilities
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


@functools.partial(jax.jit, static_argnames=("target", "drafter", "eos_id"))
def _betas(
    target: T5 | Sharded,
    target_params: Params,
    drafter: Drafter | BlockDrafter,
    draft_params: Params,
    batch: Batch,
    tokens: Int32[Array, "batch max_length"],
    eos_id: int,
    leniences: Float32[Array, " leniences"],
) -> Float32[Array, "leniences batch max_length"]:
    """Beta at each place of an output; at temperature 0 whether the draft's choice is accepted."""
    if not (isinstance(drafter, ModelDrafter) and isinstance(drafter.model, T5 | Sharded)):
        return places(target, target_params, drafter, draft_params, batch, tokens, eos_id, leniences).beta
    encoder_tokens, sampling = batch.inputs.encoder_tokens, batch.draft_sampling
    assert encoder_tokens is not None
    draft_logits = forced_logits(
        drafter.model, draft_params, encoder_tokens, _prefixes(target, tokens), sampling, eos_id
    )
    q = to_probabilities(draft_logits[:, :-1], sampling)
    everything = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    guesses = Proposal(q.tokens, None, everything) if isinstance(q, PointMass) else Proposal(tokens, q, everything)
    said = _said(target, target_params, batch, tokens, eos_id)
    return jax.lax.map(functools.partial(verification.beta, said, guesses), leniences)


class Places(NamedTuple):
    """One guess at each place of an output, after the tokens that the target itself said before it.

    Attributes:
      beta: float32 [leniences, batch, max_length], the guess's probability of acceptance; 0 where there was none.
      proposed: bool [batch, max_length], whether there was one.
      confidence: float32 [batch, max_length], the drafter's own in it; None where it has no opinion.
    """

    beta: Float32[Array, "leniences batch max_length"]
    proposed: Bool[Array, "batch max_length"]
    confidence: Float32[Array, "batch max_length"] | None


@functools.partial(jax.jit, static_argnames=("target", "drafter", "eos_id"))
def places(
    target: T5 | Sharded,
    target_params: Params,
    drafter: Drafter | BlockDrafter,
    draft_params: Params,
    batch: Batch,
    tokens: Int32[Array, "batch max_length"],
    eos_id: int,
    leniences: Float32[Array, " leniences"],
) -> Places:
    """Asks any drafter for one guess at each place, one after the other, as decoding would with gamma 1."""
    rows, length = tokens.shape
    zeros = jnp.zeros((rows,), jnp.int32)
    said = _said(target, target_params, batch, tokens, eos_id)
    history = jnp.pad(_prefixes(target, tokens), ((0, 0), (0, 2)))
    sampling = batch.draft_sampling._replace(end=End(jnp.asarray([eos_id], jnp.int32), zeros))
    rngs = row_keys(batch.seeds)
    free = make_adaptation(1, costs=(1.0, 1.0), alpha=1.0)  # a guess costs nothing, and is always made
    adaptive = Adaptive(free, look(free, zeros.astype(jnp.float32), zeros), zeros == 0)

    def at(state: Any, i: Array) -> tuple:
        keys = verification.step_keys(
            verification.token, rngs, jnp.broadcast_to(i, (rows,)), gamma=1, vocab=target.vocab_size
        )
        proposal, _, state = propose(
            drafter, draft_params, state, history, keys, 1, sampling, target.vocab_size, adaptive
        )
        here = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 2, axis=1), (said.p, said.logits))
        beta = jax.lax.map(
            lambda lenience: verification.beta(Target(here[0], here[1], said.greedy), proposal, lenience)[:, 0],
            leniences,
        )
        proposed = proposal.num_guesses > 0
        confidence = None if proposal.confidence is None else proposal.confidence[:, 0]
        return state, Places(jnp.where(proposed, beta, 0.0), proposed, confidence)

    state = drafter.init(draft_params, batch.inputs, history.shape[1])
    found = jax.lax.scan(at, state, jnp.arange(length, dtype=jnp.int32))[1]
    confidence = None if found.confidence is None else found.confidence.T
    return Places(jnp.moveaxis(found.beta, 0, 2), found.proposed.T, confidence)


def _prefixes(target: T5 | Sharded, tokens: Int32[Array, "batch max_length"]) -> Int32[Array, "batch k"]:
    """The start token and the output: one place more than the output has, as a block has one more than guesses."""
    return jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=target.config.start_id)


def _said(
    target: T5 | Sharded, params: Params, batch: Batch, tokens: Int32[Array, "batch max_length"], eos_id: int
) -> Target:
    """What the target says at each place of an output, and behind it."""
    assert batch.inputs.encoder_tokens is not None
    prefixes = _prefixes(target, tokens)
    logits = forced_logits(target, params, batch.inputs.encoder_tokens, prefixes, batch.sampling, eos_id)
    return Target(to_probabilities(logits, batch.sampling), logits, batch.sampling.greedy_rows(tokens.shape[0]))
