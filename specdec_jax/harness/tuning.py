"""What a drafter is worth: its alpha, its cost, its best gamma, and what adaptive gamma would make of it.

Tokens are counted in real decodes, so no betas have to be independent. What a step costs lies between two that are
timed whole, one without guesses and one with all: timed alone, a draft model's call is too cheap, since it finds its
weights in the processor's caches, from where decoding has the target's weights push them out. The oracle knows
beforehand how many guesses will stand, makes that many, and is what no choice can beat (the paper's section 3.5).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import generation
from specdec_jax.adaptation import make_adaptation, widths
from specdec_jax.generation import Batch, Pair
from specdec_jax.harness import acceptance, costs
from specdec_jax.results import DecodingResult
from specdec_jax.settings import Settings
from specdec_jax.sharding import fetch

_WEIGHT = 8.0  # tested guesses that what is known beforehand counts as


class Finding(NamedTuple):
    """What was found about a drafter; times are in steps of plain decoding, prefill left out.

    Attributes:
      alpha: mean probability of acceptance at each place of the target's outputs; a place without a guess counts as 0.
      alpha_error: its standard error; None of a single input.
      proposed: share of the places with a guess.
      num_tokens: places.
      lenience: alpha(l) by str(l).
      c: time of a guess; see `costs.measure_calls`.
      base: time of a step with adaptive gamma and no guess.
      full: time of one with all guesses.
      predicted: tokens in the time of a step of plain decoding, for each gamma from 1 on.
      gamma: the best one.
      adaptive: the same with adaptive gamma, up to the largest.
      oracle: the same with an oracle for gamma.
      adaptation: what adaptive gamma was told; see `Settings`.
    """

    alpha: float
    alpha_error: float | None
    proposed: float
    num_tokens: int
    lenience: dict[str, float]
    c: float
    base: float
    full: float
    predicted: dict[str, float]
    gamma: int
    adaptive: float
    oracle: float
    adaptation: dict[str, Any]

    @property
    def won(self) -> float | None:
        """How much of the way from the best fixed gamma to the oracle adaptive gamma goes; None where there is none."""
        best = self.predicted[str(self.gamma)]
        return (self.adaptive - best) / (self.oracle - best) if self.oracle > best else None


def measure_verification(work: costs.Workload, *, rounds: int) -> dict[int, float]:
    """A target call of each number of tokens that decoding may ask for, in calls of one token."""
    sizes = list(range(1, work.gamma + 2))
    blocks, _ = costs.measure_calls(work, sizes, rounds=rounds)
    return {size: costs.ratio(block, blocks[0]) for size, block in zip(sizes, blocks, strict=True)}


def measure_c(work: costs.Workload, *, rounds: int) -> float:
    """A guess, in target calls of one token."""
    (one,), draft = costs.measure_calls(work, [1], rounds=rounds)
    return costs.ratio(draft, one)


def measure_ends(work: costs.Workload, *, rounds: int) -> tuple[float, float]:
    """Steps with adaptive gamma in which no guess is found worthwhile, and all are; in steps of plain decoding."""
    none = make_adaptation(work.gamma, costs=[1.0, *[1e6] * work.gamma], alpha=0.0)
    all_ = make_adaptation(work.gamma, costs=[1.0] * (work.gamma + 1), alpha=1.0)
    works = [work._replace(adaptation=none), work._replace(adaptation=all_), work._replace(gamma=0)]
    idle, busy, plain = costs.measure_steps(works, rounds=rounds)
    base = max(costs.ratio(idle, plain), 1.0)
    return base, max(costs.ratio(busy, plain), base)


def examine(
    pair: Pair,
    batches: Sequence[Batch],
    plain: Sequence[DecodingResult],
    counted: Sequence[Batch],
    settings: Settings,
    *,
    verification: Mapping[int, float],
    c: float,
    base: float,
    full: float,
    leniences: Sequence[float] = (),
    num_inputs: int,
) -> Finding:
    """Finds out about a drafter what can be counted.

    Args:
      pair: target and drafter.
      batches: inputs to measure alpha on.
      plain: what the target alone made of each batch, numpy.
      counted: inputs to count the steps of decoding on.
      settings: with the largest gamma that comes into question.
      verification: what `measure_verification` found.
      c: what `measure_c` found.
      base: what `measure_ends` found for a step without guesses.
      full: what it found for one with all.
      leniences: for which to find alpha(l) too.
      num_inputs: after so many outputs the inputs are the same again.
    """
    every_lenience = jnp.asarray([1.0, *leniences], jnp.float32)
    look = functools.partial(acceptance.places, *pair[:4])
    betas, proposed, confidences, inside = [], [], [], []
    for batch, result in zip(batches, plain, strict=True):
        rows = batch.num_rows
        found = fetch(look(batch, jnp.asarray(result.tokens), pair.vocabulary.eos_id, every_lenience))
        betas.append(np.clip(np.asarray(found.beta, np.float64)[:, :rows], 0, 1))
        proposed.append(found.proposed[:rows])
        confidences.append(None if found.confidence is None else found.confidence[:rows])
        inside.append(np.arange(result.tokens.shape[1])[None] < result.lengths[:rows, None])
    beta, counts, there = np.concatenate(betas, axis=1), np.concatenate(inside), np.concatenate(proposed)
    alpha, error = acceptance.mean_and_error(beta[0], counts, num_inputs)
    told = counts & there
    opinions = [one for one in confidences if one is not None]
    gamma = settings.gamma
    calls = _calls(verification, gamma)
    guess = cost_of_a_guess(calls, base, full)
    own_costs = np.maximum.accumulate(step_costs(calls, base, guess)).tolist()
    adaptation = {"costs": own_costs, "weight": _WEIGHT, "c": guess}
    adaptation |= _calibrate(beta[0][told], np.concatenate(opinions)[told] if opinions else None)
    fixed = _decode(pair, counted, dataclasses.replace(settings, adaptation=None))
    adaptive = _decode(pair, counted, dataclasses.replace(settings, adaptation=adaptation))
    accepted, _ = _steps(fixed)
    fixed_costs = step_costs([verification[m + 1] for m in range(gamma + 1)], base, guess)
    predicted = {m: float(np.mean(np.minimum(accepted, m) + 1)) / fixed_costs[m] for m in range(1, gamma + 1)}
    taken, made = _steps(adaptive)
    ideal = np.asarray(calls) + c * np.arange(gamma + 1)  # an oracle drafts what will stand, and nothing else
    return Finding(
        alpha=alpha,
        alpha_error=error,
        proposed=float(there[counts].mean()),
        num_tokens=int(counts.sum()),
        lenience={
            str(x): acceptance.mean_and_error(b, counts, num_inputs)[0]
            for x, b in zip(leniences, beta[1:], strict=True)
        },
        c=c,
        base=base,
        full=full,
        predicted={str(m): value for m, value in predicted.items()},
        gamma=max(predicted, key=lambda m: predicted[m]),
        adaptive=float(np.sum(taken + 1) / np.sum(np.asarray(own_costs)[made])),
        oracle=float(np.sum(accepted + 1) / np.sum(ideal[accepted])),
        adaptation=adaptation,
    )


def cost_of_a_guess(calls: Sequence[float], base: float, full: float) -> float:
    """What each guess behind the first adds to a step besides its place in the target call.

    Args:
      calls: the target call of a step of 0 to gamma guesses.
      base: a step without guesses; the first draft call, which is always made, is in it.
      full: a step with all of them.
    """
    return max(full - base - (calls[-1] - calls[0]), 0.0) / max(len(calls) - 2, 1)


def step_costs(calls: Sequence[float], base: float, guess: float) -> list[float]:
    """What a step of 0 to gamma guesses costs; see `cost_of_a_guess`."""
    return [base + call - calls[0] + max(m - 1, 0) * guess for m, call in enumerate(calls)]


def _calls(verification: Mapping[int, float], gamma: int) -> list[float]:
    """The target call of a step of 0 to gamma guesses with adaptive gamma, which has a few widths only."""
    return [verification[next(size for size in widths(gamma) if size > m)] for m in range(gamma + 1)]


def _calibrate(beta: np.ndarray, confidence: np.ndarray | None) -> dict[str, float]:
    """Alpha where there is a guess, and the line through the betas over the drafter's confidence, by least squares."""
    if not len(beta):
        return {"alpha": 0.0, "trust": 0.0, "confidence": 0.5}
    alpha = float(beta.mean())
    if confidence is None or confidence.std() < 1e-3:
        return {"alpha": alpha, "trust": 0.0, "confidence": 0.5}
    confidence = confidence.astype(np.float64)
    mean = float(confidence.mean())
    slope = float(np.mean((beta - alpha) * (confidence - mean)) / confidence.var())
    return {"alpha": alpha, "trust": float(np.clip(slope, 0, 100)), "confidence": mean}


def _decode(pair: Pair, batches: Sequence[Batch], settings: Settings) -> list[DecodingResult]:
    """Without the rows that only fill a batch."""
    results = [(batch.num_rows, fetch(generation.decode(pair, batch, settings))) for batch in batches]
    return [jax.tree.map(lambda x, rows=rows: x[:rows], result) for rows, result in results]


def _steps(results: Sequence[DecodingResult]) -> tuple[np.ndarray, np.ndarray]:
    """Of every step: guesses accepted, as far as they were emitted, and guesses made."""
    accepted = np.concatenate([result.step_accepted.ravel() for result in results])
    made = np.concatenate([(result.step_guesses >= 0).sum(axis=-1).ravel() for result in results])
    there = accepted >= 0
    return accepted[there], made[there]
