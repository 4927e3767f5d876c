"""Checks on a pair of models that speculative decoding says what the target says, and a certificate of what was found.

Two tests, both on inputs of one's own:

    law       sequences of three tokens under top_k 3 are few enough to know the probability of each by teacher forcing;
              thousands of them are decoded speculatively and compared with that law by a chi-square test
    greedy    outputs at temperature 0 equal those of plain decoding, apart from near ties, which are counted
"""

import dataclasses
import functools
import importlib.metadata
import math
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from specdec_jax import generation
from specdec_jax.comparison import NEAR_TIE, Difference, find_differences, forced_logits, margins, near_tie
from specdec_jax.generation import Batch, Pair
from specdec_jax.models.t5 import T5
from specdec_jax.sampling import GREEDY_BELOW, PointMass, to_probabilities
from specdec_jax.settings import Settings
from specdec_jax.sharding import Sharded, fetch
from specdec_jax.types import Params

LENGTH, TOP_K = 3, 3
SIGNIFICANCE = 1e-4
"""Chance that a correct decoder fails the law test, all inputs together."""

_FEWEST_EXPECTED = 5.0  # outcomes expected less often share a cell
_MOST_ROWS, _MOST_TOKENS = 128, 8192  # of a batch of the law test

TokenLaw: TypeAlias = dict[tuple[int, ...], float]
"""{emitted tokens: probability}."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LawTest:
    """One input's chi-square test.

    Attributes:
      text: the input.
      temperature: of the draws; 1 where the settings say 0.
      sequences: how many were decoded.
      outcomes: how many different ones are possible.
      impossible: how many were decoded that the target never says.
      border: how far the closest logits lie apart of which top-k keeps one and drops the other. Near a tie rounding
        decides, and impossible outcomes are excused.
      statistic: chi-square.
      degrees: of freedom; 0 if there are too few sequences to see more than one outcome, which shows nothing.
      p_value: chance that a correct decoder has such a statistic or a greater one.
      detectable: total variation from the target's law that this test would have caught with probability 0.99; between
        outcomes expected at least five times, the others taken together.
    """

    text: str
    temperature: float
    sequences: int
    outcomes: int
    impossible: int
    border: float
    statistic: float
    degrees: int
    p_value: float
    detectable: float

    @property
    def conclusive(self) -> bool:
        """Whether it could have failed: there are cells to compare, or one outcome only and any other is a fault."""
        return self.degrees > 0 or self.outcomes == 1

    @property
    def finding(self) -> str:
        """What was found, in a line."""
        if not self.conclusive:
            return "inconclusive: one outcome takes nearly all; more sequences or a higher temperature help"
        if not self.degrees:
            return "one outcome is possible, and so there is no chi-square: any other would be a fault"
        return (
            f"chi-square {self.statistic:.1f} with {self.degrees} degrees of freedom, p = {self.p_value:.2g}; "
            f"a total variation of {self.detectable:.2f} would have shown"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GreedyTest:
    """All inputs' outputs at temperature 0.

    Attributes:
      inputs: how many.
      tokens: emitted by plain decoding.
      near_ties: places where the target's two best logits are so close that rounding may decide.
      differences: inputs whose output differs from plain decoding's.
      unexplained: those of them that do not differ at a near tie first.
    """

    inputs: int
    tokens: int
    near_ties: int
    differences: int
    unexplained: int


class Certificate(NamedTuple):
    """What was found, and with what."""

    laws: list[LawTest]
    greedy: GreedyTest
    settings: dict[str, Any]
    environment: dict[str, str]

    def lines(self) -> list[str]:
        """The certificate as text."""
        found = []
        for law in self.laws:
            found += [
                f"law     {law.text}",
                f"        temperature {law.temperature:g}, top-k {TOP_K}: {law.sequences} sequences of {LENGTH} tokens"
                f", {law.outcomes} possible outcomes, {law.impossible} others seen",
                f"        {law.finding}",
            ]
        greedy = self.greedy
        settings = {name: self.settings[name] for name in ("drafter", "gamma", "adaptive", "rule", "seed")}
        return [
            *found,
            f"greedy  {greedy.inputs} inputs, {greedy.tokens} tokens, {greedy.near_ties} near ties; "
            f"{greedy.differences} outputs differ from plain decoding, {greedy.unexplained} of them not at a near tie",
            "with    " + ", ".join(f"{name} {value}" for name, value in {**settings, **self.environment}.items()),
            self.verdict,
        ]

    @property
    def verdict(self) -> str:
        """PASSED, FAILED, or INCONCLUSIVE where nothing failed but a law test had too few sequences."""
        if self.greedy.unexplained or any(law.p_value <= SIGNIFICANCE / len(self.laws) for law in self.laws):
            return "FAILED"
        return "PASSED" if all(law.conclusive for law in self.laws) else "INCONCLUSIVE"

    @property
    def passed(self) -> bool:
        """Whether both tests could have failed and did not."""
        return self.verdict == "PASSED"

    def as_dict(self) -> dict[str, Any]:
        """The certificate as plain values, for JSON."""
        fields = {"laws": [dataclasses.asdict(law) for law in self.laws], "greedy": dataclasses.asdict(self.greedy)}
        return {"passed": self.passed, **self._asdict(), **fields}


def verify(
    pair: Pair,
    texts: Sequence[str],
    encoded: Sequence[Sequence[int]],
    settings: Settings,
    *,
    num_sequences: int,
    num_laws: int,
    report: Callable[[str, float], None],
) -> Certificate:
    """Runs both tests.

    Args:
      pair: the models.
      texts: inputs.
      encoded: their ids, from `generation.encode`.
      settings: gamma, rule, seed and lengths; the law test has a temperature of its own where that is 0.
      num_sequences: sequences decoded of each input of the law test.
      num_laws: how many inputs, from the first on, the law test takes.
      report: told what is being done, and what share of it is done.

    Raises:
      ValueError: lenience is below 1, which nobody can certify.
    """
    check(settings)
    chosen = min(num_laws, len(texts))
    laws = []
    for i in range(chosen):
        name = f"law of input {i + 1} of {chosen}"
        tell = functools.partial(report, name)
        each = SIGNIFICANCE / chosen
        laws.append(check_law(pair, texts[i], encoded[i], settings, num_sequences, tell, significance=each))
    greedy = check_greedy(pair, encoded, settings, functools.partial(report, "greedy outputs"))
    told = {**dataclasses.asdict(settings), "rule": settings.verification_rule().__name__}
    told |= {"drafter": type(pair.drafter).__name__, "adaptive": settings.adaptation is not None}
    return Certificate(laws, greedy, told, environment(pair))


def check(settings: Settings) -> None:
    """Refuses settings that nobody can certify.

    Raises:
      ValueError: lenience is below 1.
    """
    if settings.lenience < 1:
        raise ValueError(f"lenience is {settings.lenience}; only 1 is exact, so there is nothing to verify.")


def environment(pair: Pair) -> dict[str, str]:
    """Versions, device and precision."""
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in ("specdec_jax", "jax", "jaxlib", "flax", "numpy")}
    machine = {"python": platform.python_version(), "device": f"{device.platform} {device.device_kind}"}
    return {**versions, **machine, "dtype": pair.target.config.dtype.name}


def check_law(
    pair: Pair,
    text: str,
    ids: Sequence[int],
    settings: Settings,
    num_sequences: int,
    report: Callable[[float], None],
    *,
    significance: float = SIGNIFICANCE,
) -> LawTest:
    """Decodes many sequences of one input and compares them with their exact law."""
    temperature = settings.temperature if settings.temperature >= GREEDY_BELOW else 1.0
    width = generation.padded_length(len(ids), settings.max_input_length)
    parts = 1 if settings.mesh is None else settings.mesh[0]
    num_rows = _multiple(parts, min(_MOST_ROWS, _MOST_TOKENS // width, num_sequences))
    settings = dataclasses.replace(
        settings,
        temperature=temperature,
        top_k=TOP_K,
        max_decode_length=LENGTH,
        min_decode_length=min(settings.min_decode_length, LENGTH),
        batch_size=num_rows,
    )
    (batch,) = generation.make_batches([ids] * num_rows, pair.vocabulary, settings)
    law, border = exact_law(pair, batch, parts=parts)
    seen: Counter[tuple[int, ...]] = Counter()
    num_calls = -(-num_sequences // num_rows)
    for call in range(num_calls):
        seeds = [generation.row_seed(settings.seed, 1 + call * num_rows + row) for row in range(num_rows)]
        result = fetch(generation.decode(pair, batch._replace(seeds=jnp.asarray(seeds, jnp.int32)), settings))
        for tokens, length in zip(result.tokens.tolist(), result.lengths.tolist(), strict=True):
            seen[tuple(tokens[:length])] += 1
        report((call + 1) / num_calls)
    found = chi_square(law, seen, excuse=border < NEAR_TIE[pair.target.config.dtype.name])
    return LawTest(
        text=text,
        temperature=temperature,
        sequences=sum(seen.values()),
        outcomes=len(law),
        border=border,
        detectable=detectable(found.degrees, sum(seen.values()), significance),
        **found._asdict(),
    )


def _multiple(of: int, least: int) -> int:
    """The least positive multiple of a number that is no less than another: rows have to divide over a mesh."""
    return of * max(1, -(-least // of))


def exact_law(pair: Pair, batch: Batch, *, parts: int = 1) -> tuple[TokenLaw, float]:
    """The law of the first LENGTH tokens of the batch's first row, by teacher forcing of every beginning.

    Args:
      pair: the models.
      batch: whose first row it is about.
      parts: devices that rows are split over.

    Returns:
      The law, and the least distance anywhere between the last logit that top-k keeps and the first that it drops.
    """
    eos_id = pair.vocabulary.eos_id
    law: TokenLaw = {(): 1.0}
    border = math.inf
    for depth in range(LENGTH):
        beginnings = [tokens for tokens in law if eos_id not in tokens]
        rows = np.zeros((_multiple(parts, TOP_K ** (LENGTH - 1)), LENGTH), np.int32)
        rows[:, 0] = pair.target.config.start_id
        for row, tokens in enumerate(beginnings):
            rows[row, 1 : 1 + depth] = tokens
        p, borders = fetch(_said(pair.target, pair.target_params, batch, jnp.asarray(rows), eos_id))
        if np.isnan(p[: len(beginnings), depth]).any():
            raise ValueError(
                "the target's logits are NaN, or the settings leave no id: there is no law to compare with."
            )
        border = min([border, *borders[: len(beginnings), depth].tolist()])
        ended = {tokens: probability for tokens, probability in law.items() if eos_id in tokens}
        going_on = {
            (*tokens, int(token)): law[tokens] * float(p[row, depth, token])
            for row, tokens in enumerate(beginnings)
            for token in np.flatnonzero(p[row, depth])
        }
        law = {**ended, **going_on}
    return law, border


@functools.partial(jax.jit, static_argnames=("target", "eos_id"))
def _said(
    target: T5 | Sharded, params: Params, batch: Batch, tokens: Int32[Array, "rows length"], eos_id: int
) -> tuple[Float32[Array, "rows length vocab"], Float32[Array, "rows length"]]:
    """What the target says after every place of each row, the batch's first input before it, and top-k's border."""
    rows = tokens.shape[0]
    assert batch.inputs.encoder_tokens is not None
    encoder_tokens = jnp.broadcast_to(batch.inputs.encoder_tokens[:1], (rows, batch.inputs.encoder_tokens.shape[1]))
    sampling = batch.sampling.of_first_row(rows)
    logits = forced_logits(target, params, encoder_tokens, tokens, sampling, eos_id)
    p = to_probabilities(logits, sampling)
    assert not isinstance(p, PointMass)
    best = jax.lax.top_k(logits, TOP_K + 1)[0]
    return p, best[..., TOP_K - 1] - best[..., TOP_K]


class ChiSquare(NamedTuple):
    """What a comparison of counts with a law gives; see `LawTest`."""

    impossible: int
    statistic: float
    degrees: int
    p_value: float


def chi_square(law: Mapping[tuple[int, ...], float], seen: Mapping[tuple[int, ...], int], *, excuse: bool) -> ChiSquare:
    """Compares counts with a law.

    Args:
      law: of the outcomes. Those expected less than five times share a cell.
      seen: how often each outcome was.
      excuse: count an outcome that the law has not among the rare ones, instead of failing.
    """
    total = sum(seen.values())
    impossible = sum(count for outcome, count in seen.items() if law.get(outcome, 0.0) < 1e-9)
    cells, rare = [], np.array([0.0, float(impossible)])
    for outcome, probability in law.items():
        cell = np.array([probability * total, seen.get(outcome, 0) if probability >= 1e-9 else 0.0])
        if cell[0] >= _FEWEST_EXPECTED:
            cells.append(cell)
        else:
            rare += cell
    cells.sort(key=lambda cell: -cell[0])
    if rare[0] >= _FEWEST_EXPECTED or not cells:
        cells.append(rare)
    else:
        cells[-1] = cells[-1] + rare
    expected, observed = np.array(cells).T
    statistic, degrees = float(((observed - expected) ** 2 / expected).sum()), len(cells) - 1
    p_value = _upper_tail(statistic, degrees) if degrees else 1.0
    return ChiSquare(impossible, statistic, degrees, 0.0 if impossible and not excuse else p_value)


def _upper_tail(statistic: float, degrees: int) -> float:
    """P(chi-square with so many degrees of freedom > statistic)."""
    return float(jax.scipy.stats.chi2.sf(statistic, degrees))


def detectable(degrees: int, total: int, significance: float = SIGNIFICANCE) -> float:
    """The total variation that the test catches with probability 0.99, whatever its direction between the cells.

    A law at total variation d has a noncentrality of at least total (2 d)^2, by Cauchy and Schwarz. The noncentral
    chi-square is taken as normal, with mean k + x and variance 2 (k + 2 x).
    """
    if degrees == 0:
        return 1.0
    low, high = 0.0, 10.0 * degrees + 1000.0
    for _ in range(60):  # the statistic that a correct decoder exceeds with probability `significance`
        middle = (low + high) / 2
        low, high = (middle, high) if _upper_tail(middle, degrees) > significance else (low, middle)
    noncentrality = 0.0
    while degrees + noncentrality - 2.33 * math.sqrt(2 * (degrees + 2 * noncentrality)) < high:
        noncentrality += 0.1
    return min(1.0, math.sqrt(noncentrality / total) / 2)


def check_greedy(
    pair: Pair, encoded: Sequence[Sequence[int]], settings: Settings, report: Callable[[float], None]
) -> GreedyTest:
    """Decodes every input at temperature 0, with guesses and without."""
    settings = dataclasses.replace(settings, temperature=0.0, draft_temperature=None)
    batches = generation.make_batches(encoded, pair.vocabulary, settings)
    dtype = pair.target.config.dtype.name
    tokens = near_ties = 0
    differences: list[Difference] = []
    for i, batch in enumerate(batches, start=1):
        plain, guessed = (
            jax.tree.map(lambda x, n=batch.num_rows: x[:n], fetch(decode(pair, batch, settings)))
            for decode in (generation.decode_plainly, generation.decode)
        )
        differences += find_differences(pair, batch, plain.tokens, guessed.tokens)
        inside = np.arange(plain.tokens.shape[1])[None] < plain.lengths[:, None]
        near = margins(pair, batch, plain.tokens) < NEAR_TIE[dtype]
        tokens, near_ties = tokens + int(inside.sum()), near_ties + int((near & inside).sum())
        report(i / len(batches))
    return GreedyTest(
        inputs=len(encoded),
        tokens=tokens,
        near_ties=near_ties,
        differences=len(differences),
        unexplained=sum(not near_tie(difference, dtype) for difference in differences),
    )
