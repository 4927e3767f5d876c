"""Decoding with and without speculation, side by side: speed, acceptance, and whether the outputs are equal."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32
from rich.box import SIMPLE_HEAD
from rich.table import Table

from specdec_jax.generation import Batch, Pair, decode, decode_plainly
from specdec_jax.models.t5 import T5
from specdec_jax.results import DecodingResult
from specdec_jax.sampling import (
    GREEDY_BELOW,
    End,
    PointMass,
    Sampling,
    constrain,
    gumbel_noise,
    row_keys,
    to_probabilities,
)
from specdec_jax.settings import Settings
from specdec_jax.sharding import Sharded, fetch
from specdec_jax.timing import interleaved
from specdec_jax.types import Params

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25}
"""Two logits closer than this may change places between a one-token and a block call, whose sums round differently."""


class Difference(NamedTuple):
    """Where speculative and plain decoding first differ in a row, though they should be equal.

    Attributes:
      row: the row.
      position: of the first token that differs.
      margin: how far the target's choice was above its next best one there, by teacher forcing: of logits where it
        is greedy; under the coupled rule of noisy log-probabilities times the temperature. An id that crosses a
        filter's border by rounding does not show in it.
    """

    row: int
    position: int
    margin: float


class Comparison(NamedTuple):
    """A batch decoded both ways; the results are numpy, without the copies that fill a batch.

    Attributes:
      plain: the target alone.
      speculative: with guesses.
      plain_seconds: median time of a plain decode.
      speculative_seconds: median time of a speculative decode.
      differences: rows whose tokens differ; None where only the law is the same: above temperature 0, unless the rule
        is the coupled one, and where lenience is below 1.
    """

    plain: DecodingResult
    speculative: DecodingResult
    plain_seconds: float
    speculative_seconds: float
    differences: list[Difference] | None


class Summary(NamedTuple):
    """Figures of one or more comparisons.

    Attributes:
      tokens: tokens emitted speculatively.
      target_calls: of speculative decoding.
      plain_speed: tokens per second without guesses.
      speed: tokens per second with guesses.
      alpha: mean probability of acceptance over the guesses that were tested; 0 where none was.
    """

    tokens: int
    target_calls: int
    plain_speed: float
    speed: float
    alpha: float

    @property
    def speedup(self) -> float:
        """Ratio of the speeds in tokens per second; of the times, where both emit the same. NaN where neither did."""
        return self.speed / self.plain_speed if self.plain_speed else math.nan

    @property
    def tokens_per_call(self) -> float:
        """Mean tokens per target call, 1 to gamma + 1; 0 where the first logits were NaN."""
        return self.tokens / self.target_calls


def compare(pair: Pair, batch: Batch, settings: Settings, *, repeats: int) -> Comparison:
    """Decodes a batch both ways, `repeats` timed times each, in turn."""
    plain, speculative = interleaved(
        [lambda: decode_plainly(pair, batch, settings), lambda: decode(pair, batch, settings)], repeats=repeats
    )
    plain_result, speculative_result = (
        jax.tree.map(lambda x: x[: batch.num_rows], fetch(timed.value)) for timed in (plain, speculative)
    )
    differences = None
    same_tokens = settings.temperature < GREEDY_BELOW or settings.rule == "coupled"
    if same_tokens and settings.lenience == 1:
        differences = find_differences(pair, batch, plain_result.tokens, speculative_result.tokens)
    return Comparison(plain_result, speculative_result, plain.seconds, speculative.seconds, differences)


def find_differences(
    pair: Pair, batch: Batch, plain: Int32[np.ndarray, "rows length"], speculative: Int32[np.ndarray, "rows length"]
) -> list[Difference]:
    """The rows whose tokens differ, with the target's margin where they do."""
    unequal = plain != speculative
    rows = np.flatnonzero(unequal.any(axis=1))
    if not rows.size:
        return []
    margin = margins(pair, batch, plain)
    first = unequal.argmax(axis=1)
    return [Difference(int(row), int(first[row]), float(margin[row, first[row]])) for row in rows]


def margins(pair: Pair, batch: Batch, tokens: Int32[np.ndarray, "rows length"]) -> Float32[np.ndarray, "rows length"]:
    """How far the target's choice is above its next best one at each place of plainly decoded outputs."""
    filled = np.zeros((len(batch.seeds), tokens.shape[1]), np.int32)
    filled[: len(tokens)] = tokens
    found = _margins(pair.target, pair.target_params, batch, jnp.asarray(filled), pair.vocabulary.eos_id)
    return fetch(found)[: len(tokens)]


@functools.partial(jax.jit, static_argnames=("target", "eos_id"))
def _margins(
    target: T5 | Sharded, params: Params, batch: Batch, tokens: Int32[Array, "batch max_length"], eos_id: int
) -> Float32[Array, "batch max_length"]:
    """How far the best score is above the next, at each place of an output."""
    encoder_tokens, start = batch.inputs.encoder_tokens, jnp.zeros(tokens.shape[0], jnp.int32)
    assert encoder_tokens is not None
    shifted = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=target.config.start_id)
    sampling = batch.sampling
    scores = forced_logits(target, params, encoder_tokens, shifted, sampling, eos_id)
    p = to_probabilities(scores, sampling)
    if not isinstance(p, PointMass):
        assert sampling.temperature is not None
        rngs = row_keys(batch.seeds)
        scores = jnp.log(p) + gumbel_noise(rngs, start, tokens.shape[1], target.vocab_size)
        scores = scores * jnp.maximum(sampling.temperature, GREEDY_BELOW)[:, None, None]  # in units of logits
    best = jax.lax.top_k(scores, 2)[0]
    return best[..., 0] - best[..., 1]


def forced_logits(
    target: T5 | Sharded,
    params: Params,
    encoder_tokens: Int32[Array, "batch length"],
    decoder_tokens: Int32[Array, "batch k"],
    sampling: Sampling,
    eos_id: int,
) -> Float32[Array, "batch k vocab"]:
    """Constrained logits by teacher forcing: what decoding makes probabilities of, in one call without a cache."""
    start = jnp.zeros(decoder_tokens.shape[0], jnp.int32)
    sampling = sampling._replace(end=End(jnp.asarray([eos_id], jnp.int32), start))
    return constrain(target.forward(params, encoder_tokens, decoder_tokens), sampling, decoder_tokens, start)


def summarize(comparisons: Sequence[Comparison]) -> Summary:
    """Adds up comparisons: all tokens over all time, all acceptance over all tested guesses."""
    tokens = sum(int(c.speculative.lengths.sum()) for c in comparisons)
    trials = sum(int(c.speculative.trials.sum()) for c in comparisons)
    return Summary(
        tokens=tokens,
        target_calls=sum(int(c.speculative.num_target_calls.sum()) for c in comparisons),
        plain_speed=sum(int(c.plain.lengths.sum()) for c in comparisons) / sum(c.plain_seconds for c in comparisons),
        speed=tokens / sum(c.speculative_seconds for c in comparisons),
        alpha=sum(float(c.speculative.beta_sum.sum()) for c in comparisons) / max(trials, 1),
    )


def near_tie(difference: Difference, dtype: str) -> bool:
    """Whether a difference is one of rounding; `dtype` is that of the target's activations."""
    return difference.margin < NEAR_TIE[dtype]


def verdict(comparisons: Sequence[Comparison], dtype: str) -> str:
    """Whether the outputs are equal, in a word or two; "law" says that no more than their law can be."""
    if any(c.differences is None for c in comparisons):
        return "law"
    differences = [d for c in comparisons for d in c.differences or ()]
    near = sum(near_tie(d, dtype) for d in differences)
    if near < len(differences):
        return "NO"
    return f"{near} near tie{'s' * (near > 1)}" if near else "yes"


def explain(comparisons: Sequence[Comparison], dtype: str) -> list[str]:
    """A line for every input whose outputs differ and should not; inputs count from 1."""
    lines, first = [], 1
    for comparison in comparisons:
        for d in comparison.differences or ():
            kind = "a near tie" if near_tie(d, dtype) else "NOT a near tie"
            lines.append(
                f"input {first + d.row} differs from token {d.position + 1} on, where the target's two best choices "
                f"are {d.margin:.2g} apart: {kind}."
            )
        first += len(comparison.plain.lengths)
    return lines


def table(comparisons: Sequence[Comparison], dtype: str, *, temperature: float) -> Table:
    """A line per batch, and one for all."""
    grid = Table(title=f"temperature {temperature:g}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("input", "tokens", "target calls", "tokens / call", "alpha", "plain tok/s", "spec. tok/s", "speedup"):
        grid.add_column(name, justify="right")
    grid.add_column("equal output")

    def add(name: str, some: Sequence[Comparison]) -> None:
        s = summarize(some)
        figures = (f"{s.tokens_per_call:.2f}", f"{s.alpha:.2f}", f"{s.plain_speed:.0f}", f"{s.speed:.0f}")
        counts = (str(s.tokens), str(s.target_calls))
        grid.add_row(name, *counts, *figures, f"{s.speedup:.2f}x", verdict(some, dtype))

    first = 1
    for comparison in comparisons:
        last = first + len(comparison.plain.lengths) - 1
        add(f"{first}" if first == last else f"{first}-{last}", [comparison])
        first = last + 1
    if len(comparisons) > 1:
        grid.add_section()
        add("all", comparisons)
    return grid
