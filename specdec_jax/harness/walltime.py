"""Walltime of speculative against plain decoding, paired per prompt, in alternating order."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from specdec_jax.harness.costs import Costs, Workload
from specdec_jax.sharding import fetch
from specdec_jax.timing import interleaved

_RESAMPLES = 10_000


Margins: TypeAlias = Callable[[Workload, np.ndarray, np.ndarray], list[float]]
"""(work, plain tokens, speculative tokens) -> the target's margin where each row that differs does so first."""


class Paired(NamedTuple):
    """One prompt, or batch of prompts, decoded both ways.

    Attributes:
      plain_seconds: of each plain decode.
      seconds: of each speculative decode, entry by entry beside the plain one's.
      tokens: emitted speculatively, over all rows; plain decoding is stopped at the same lengths.
      longest: the longest row's.
      steps: target calls of the speculative loop.
      calls: of them what each row took part in, over all rows.
      accepted: guesses accepted.
      trials: guesses tested.
      equal: whether the outputs are equal; None where only their law is.
      margins: where a row differs first, by how much the target prefers plain decoding's token; one per such row.
    """

    plain_seconds: list[float]
    seconds: list[float]
    tokens: int
    longest: int
    steps: int
    calls: int
    accepted: int
    trials: int
    equal: bool | None
    margins: list[float]

    @property
    def speedup(self) -> float:
        """The median over repeats of the ratio of two neighbouring times."""
        return float(np.median(np.divide(self.plain_seconds, self.seconds)))


def measure(
    works: Sequence[Workload],
    *,
    eos_ids: Sequence[int],
    repeats: int,
    margins: Margins | None,
) -> list[Paired]:
    """Times both ways of decoding each batch.

    Plain decoding is asked for as many tokens as speculative decoding emitted, and no end of its own: at temperature 0
    it then returns the very same ones; above it another sample, but of the same length, so that the two times are of
    the same work.

    Args:
      works: one per prompt or batch of prompts; equal shapes share a program.
      eos_ids: ends of an output.
      repeats: timed decodes of each, in turn; the order changes from prompt to prompt.
      margins: asked about outputs that differ; None where they only have to have the same law.
    """
    pairs = []
    for number, work in enumerate(works):
        first = fetch(work.run(limit=work.max_length, eos_ids=eos_ids))
        lengths = np.asarray(first.lengths)

        def speculative(work: Workload = work) -> object:
            return work.run(limit=work.max_length, eos_ids=eos_ids)

        def plain(work: Workload = work, lengths: np.ndarray = lengths) -> object:
            return work.run(limit=lengths, gamma=0)

        if number % 2:
            spec_time, plain_time = interleaved([speculative, plain], repeats=repeats)
        else:
            plain_time, spec_time = interleaved([plain, speculative], repeats=repeats)
        result, alone = fetch(spec_time.value), fetch(plain_time.value)
        equal = np.array_equal(result.tokens, alone.tokens)
        pairs.append(
            Paired(
                plain_seconds=list(plain_time.all_seconds),
                seconds=list(spec_time.all_seconds),
                tokens=int(lengths.sum()),
                longest=int(lengths.max()),
                steps=int(np.max(result.num_target_calls)),
                calls=int(np.sum(result.num_target_calls)),
                accepted=int(np.sum(result.accepted)),
                trials=int(np.sum(result.trials)),
                equal=None if margins is None else equal,
                margins=[] if margins is None or equal else margins(work, alone.tokens, result.tokens),
            )
        )
    return pairs


class Speedup(NamedTuple):
    """A geometric mean over prompts with a bootstrap interval of 95 %; without one where there is one prompt."""

    mean: float
    low: float | None
    high: float | None


def geometric_mean(ratios: Sequence[float]) -> Speedup:
    """The geometric mean of paired ratios; the interval is of resampled prompts.

    Raises:
      ValueError: there is none, or one is not above 0.
    """
    if not ratios or min(ratios) <= 0:
        raise ValueError(f"ratios are {list(ratios)}; there must be some, all above 0.")
    logs = np.log(ratios)
    if len(logs) == 1:  # it says nothing about the spread
        return Speedup(float(ratios[0]), None, None)
    draws = np.random.default_rng(0).integers(0, len(logs), (_RESAMPLES, len(logs)))
    low, high = np.quantile(logs[draws].mean(axis=1), [0.025, 0.975])
    return Speedup(*(float(np.exp(x)) for x in (logs.mean(), low, high)))


def predict_from_tokens(pairs: Sequence[Paired], costs: Costs) -> float:
    """The speedup that the measured steps and costs of calls imply, without any assumption about the betas.

    Both encoders run on the speculative side and the target's on the plain one; what is between the calls is left out,
    so that measured / predicted is what the implementation loses. Geometric mean over prompts, as of the measured.
    """
    start, start_draft = np.median(costs.prefill_target), np.median(costs.prefill_draft)
    one, step = np.median(costs.target_one), np.median(costs.bodies)
    plain = np.asarray([start + pair.longest * one for pair in pairs])
    speculative = np.asarray([start + start_draft + pair.steps * step for pair in pairs])
    return float(np.exp(np.mean(np.log(plain / speculative))))
