"""From logits to an explicit probability vector, and draws from it (the paper's section 2.2).

Target and draft go through the same `standardize`; that p and q mean the same thing is what makes speculative decoding
exact. Nothing here sorts the vocabulary: draws are by inverse CDF, thresholds of filters are found bit by bit.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Key

from specdec_jax import constraints, filters

HOTTEST = 1e6  # far above it all ids are equally likely to float32
GREEDY_BELOW = 1e-4  # a temperature below this is argmax, as in t5x

DRAW, ACCEPT, EXTRA, NOISE = 0, 1, 2, 3  # what a random number is for
_PURPOSES = 4


class Sampling(NamedTuple):
    """How logits become probabilities, in the order in which it is done. None: no such rule.

    Which rules exist is static, their values are traced: changing a number does not recompile.

    Attributes:
      num_ids: int32 scalar, ids from here on are padding of the embedding and have probability 0.
      repetition_penalty: float32 [batch], above 1 makes ids of the history less likely, as in CTRL.
      no_repeat_ngram: int32 [batch], no run of so many tokens comes twice; 0 allows all.
      min_length: int32 [batch], tokens before the first one that may be an EOS.
      forbidden_ids: int32 [n], ids of probability 0.
      temperature: float32 [batch], above 0 where the row is not greedy. None: every row is argmax, and nothing as wide
        as the vocabulary is built.
      greedy: bool [batch], the rows that are argmax where only some are; None where no row is, or every one. Belongs to
        the temperatures: `make_sampling` makes both, to be replaced together.
      top_k: int32 [batch], keep the k most likely ids; 0 keeps all.
      top_p: float32 [batch], keep the fewest ids whose probabilities sum to at least top_p; 1 keeps all.
      min_p: float32 [batch], keep ids at least min_p times as likely as the likeliest; 0 keeps all.
      end: where min_length counts from, and which ids it is about; decoding sets it.
    """

    num_ids: Int32[Array, ""] | None = None
    repetition_penalty: Float32[Array, " batch"] | None = None
    no_repeat_ngram: Int32[Array, " batch"] | None = None
    min_length: Int32[Array, " batch"] | None = None
    forbidden_ids: Int32[Array, " n"] | None = None
    temperature: Float32[Array, " batch"] | None = None
    greedy: Bool[Array, " batch"] | None = None
    top_k: Int32[Array, " batch"] | None = None
    top_p: Float32[Array, " batch"] | None = None
    min_p: Float32[Array, " batch"] | None = None
    end: "End | None" = None

    @property
    def batch(self) -> int | None:
        """How many rows it is for; None where no setting belongs to a row."""
        per_row = self._per_row()
        return next(iter(per_row.values())).shape[0] if per_row else None

    def greedy_rows(self, batch: int) -> Bool[Array, " batch"]:
        """Which rows are argmax."""
        if self.temperature is None or self.greedy is None:
            return jnp.full((batch,), self.temperature is None)
        return self.greedy

    def of_first_row(self, rows: int) -> "Sampling":
        """The first row's settings, for so many rows."""
        return self._replace(**{name: jnp.broadcast_to(x[:1], (rows,)) for name, x in self._per_row().items()})

    def _per_row(self) -> dict[str, Array]:
        shared = ("num_ids", "forbidden_ids", "end")
        return {name: x for name, x in self._asdict().items() if x is not None and name not in shared}


class End(NamedTuple):
    """What ends a row, and where its decoding began.

    Attributes:
      eos_ids: int32 [eos].
      prompt_positions: int32 [batch], the position of the last token that was given.
    """

    eos_ids: Int32[Array, " eos"]
    prompt_positions: Int32[Array, " batch"]


class PointMass(NamedTuple):
    """A distribution that puts probability 1 on one id; int32 [batch, k]."""

    tokens: Int32[Array, "batch k"]


PerRow: TypeAlias = float | int | Sequence[float] | Sequence[int] | np.ndarray
"""One value for all rows, or one for each."""

Standardized: TypeAlias = Float[Array, "batch k vocab"] | PointMass


def make_sampling(
    batch: int,
    *,
    temperature: PerRow = 1.0,
    top_k: PerRow = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
    min_length: PerRow = 0,
    forbidden_ids: Sequence[int] = (),
    repetition_penalty: PerRow = 1.0,
    no_repeat_ngram: PerRow = 0,
    num_ids: int | None = None,
) -> Sampling:
    """Builds a Sampling, one value for all rows or one for each, without the rules that would do nothing.

    Args:
      batch: number of rows.
      temperature: at least 0; below 1e-4 is argmax.
      top_k: 0 for no such filter, else how many ids to keep.
      top_p: in (0, 1]; 1 for no such filter.
      min_p: in [0, 1]; 0 for no such filter.
      min_length: tokens before the first that may end the row; 0 for no such rule.
      forbidden_ids: ids never to emit, for all rows.
      repetition_penalty: above 0; 1 for no such rule.
      no_repeat_ngram: length of a run of tokens that may not come twice; 0 for no such rule.
      num_ids: valid ids of the vocabulary, where the embedding has more rows than that.

    Raises:
      ValueError: a value is out of its range, there is not one per row, or no id is left.
    """
    cold, hot = np.asarray(temperature) >= 0, np.asarray(temperature) <= HOTTEST
    _check("temperature", temperature, cold & hot, f"a finite number, 0 (argmax) to {HOTTEST:g}")
    temperatures = _per_row("temperature", temperature, batch, np.float32)
    weak, strong = np.asarray(repetition_penalty) >= 1e-3, np.asarray(repetition_penalty) <= 1e3
    _check("repetition_penalty", repetition_penalty, weak & strong, "0.001 to 1000 (1: no penalty)")
    penalties = _per_row("repetition_penalty", repetition_penalty, batch, np.float32)
    top_ps = _per_row("top_p", top_p, batch, np.float32)
    _check("top_p", top_p, (top_ps > 0) & (top_ps <= 1), "above 0 and at most 1 (1: no filter)")
    min_ps = _per_row("min_p", min_p, batch, np.float32)
    _check("min_p", min_p, (min_ps >= 0) & (min_ps <= 1), "0 to 1 (0: no filter)")
    counts = {"top_k": top_k, "min_length": min_length, "no_repeat_ngram": no_repeat_ngram}
    whole = {name: _per_row(name, value, batch, np.int32) for name, value in counts.items()}
    for name, values in whole.items():
        _check(name, counts[name], values >= 0, "a whole number, 0 (no such rule) or more")
    if num_ids is not None and num_ids < 1:
        raise ValueError(f"num_ids is {num_ids}; it must be the number of valid ids, 1 or more.")
    _check("forbidden_ids", forbidden_ids, np.asarray(forbidden_ids, np.int64) >= 0, "ids, each 0 or more")
    if num_ids is not None:
        _check("forbidden_ids", forbidden_ids, np.asarray(forbidden_ids, np.int64) < num_ids, f"ids below {num_ids}")
        if len(set(forbidden_ids)) == num_ids:
            raise ValueError(f"forbidden_ids holds all of the {num_ids} ids; leave at least one.")
    cold_rows = temperatures < GREEDY_BELOW
    greedy = cold_rows.all()

    def unless(nothing: float | int, values: np.ndarray) -> Array | None:
        return None if (values == nothing).all() else jnp.asarray(values)

    return Sampling(
        num_ids=None if num_ids is None else jnp.int32(num_ids),
        repetition_penalty=unless(1, penalties),
        no_repeat_ngram=unless(0, whole["no_repeat_ngram"]),
        min_length=unless(0, whole["min_length"]),
        forbidden_ids=jnp.asarray(forbidden_ids, jnp.int32) if len(forbidden_ids) else None,
        temperature=None if greedy else jnp.asarray(temperatures),
        greedy=jnp.asarray(cold_rows) if cold_rows.any() and not greedy else None,
        top_k=None if greedy else unless(0, whole["top_k"]),
        top_p=None if greedy else unless(1, top_ps),
        min_p=None if greedy else unless(0, min_ps),
    )


def _check(name: str, value: PerRow, good: np.ndarray | np.bool_, rule: str) -> None:
    if not good.all():
        raise ValueError(f"{name} is {value}; it must be {rule}.")


def _per_row(name: str, value: PerRow, batch: int, dtype: type) -> np.ndarray:
    values = np.asarray(value)
    if values.shape not in ((), (batch,)):
        raise ValueError(f"{name} has shape {values.shape}; give one value, or one for each of the {batch} rows.")
    if np.issubdtype(dtype, np.integer):
        _check(name, value, (values == np.floor(values)) & (values < 2**31), "a whole number below 2**31")
    return np.broadcast_to(values.astype(dtype), (batch,))


def standardize(
    logits: Float32[Array, "batch k vocab"],
    sampling: Sampling,
    tokens: Int32[Array, "batch capacity"],
    positions: Int32[Array, " batch"],
) -> Standardized:
    """Turns logits into the distribution that is sampled from; the same function for p and q.

    Args:
      logits: float32 [batch, k, vocab]; query i is about the token after position `positions + i`.
      sampling: the settings.
      tokens: int32 [batch, capacity], the history: query i sees slots 0 to `positions + i`, guesses included.
      positions: int32 [batch], the position of query 0.

    Returns:
      float32 [batch, k, vocab] that sums to 1, or a PointMass where every row is greedy. NaN logits give NaN.
    """
    return to_probabilities(constrain(logits, sampling, tokens, positions), sampling)


def constrain(
    logits: Float32[Array, "batch k vocab"],
    sampling: Sampling,
    tokens: Int32[Array, "batch capacity"],
    positions: Int32[Array, " batch"],
) -> Float32[Array, "batch k vocab"]:
    """The first half of `standardize`: what does not depend on the temperature. -inf where an id is impossible.

    Where the rules leave no id at all, the result is NaN, which ends the row as NaN logits do.
    """
    if sampling.num_ids is not None:
        logits = jnp.where(_ids(logits) < sampling.num_ids, logits, -jnp.inf)
    given = logits
    if sampling.repetition_penalty is not None:
        logits = constraints.penalize_repetition(logits, tokens, positions, sampling.repetition_penalty)
    if sampling.no_repeat_ngram is not None:
        logits = constraints.ban_repeated_ngrams(logits, tokens, positions, sampling.no_repeat_ngram)
    if sampling.min_length is not None:
        if sampling.end is None:
            raise ValueError("Sampling.min_length is set and Sampling.end is None; decoding sets it, or give it.")
        first = sampling.end.prompt_positions + 1 + sampling.min_length
        logits = constraints.forbid_before(logits, sampling.end.eos_ids, positions, first)
    if sampling.forbidden_ids is not None:
        logits = constraints.forbid(logits, sampling.forbidden_ids)
    if logits is given:
        return logits
    return jnp.where(jnp.all(jnp.isneginf(logits), axis=-1, keepdims=True), jnp.nan, logits)


def log_probabilities(
    logits: Float32[Array, "batch k vocab"], tokens: Int32[Array, "batch k"]
) -> Float32[Array, "batch k"]:
    """The logarithm of softmax(logits) at one id each; NaN where any of the logits is."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.sum(jnp.exp(logits - largest), axis=-1)
    return (jnp.take_along_axis(logits, tokens[..., None], axis=-1) - largest)[..., 0] - jnp.log(total)


def to_probabilities(logits: Float32[Array, "batch k vocab"], sampling: Sampling) -> Standardized:
    """The second half of `standardize`: temperature and the filters that follow it."""
    if sampling.temperature is None:
        return PointMass(_best(logits))
    temperature = sampling.temperature[:, None, None]
    if sampling.greedy is not None:
        temperature = jnp.where(sampling.greedy[:, None, None], 1.0, temperature)
    scaled = logits / temperature
    scaled = scaled - jnp.max(scaled, axis=-1, keepdims=True)
    if sampling.top_k is not None:
        scaled = jnp.where(filters.keep_top_k(scaled, sampling.top_k[:, None]), scaled, -jnp.inf)
    if sampling.top_p is not None:
        scaled = jnp.where(filters.keep_top_p(scaled, sampling.top_p[:, None]), scaled, -jnp.inf)
    if sampling.min_p is not None:
        likely = scaled >= jnp.log(sampling.min_p)[:, None, None]
        scaled = jnp.where(likely | _is_best(logits), scaled, -jnp.inf)  # the best one too where min_p is 1
    weight = jnp.exp(scaled)
    p = weight / jnp.sum(weight, axis=-1, keepdims=True)
    if sampling.greedy is None:
        return p
    return jnp.where(sampling.greedy[:, None, None] & ~jnp.isnan(p), _is_best(logits).astype(p.dtype), p)


def _best(logits: Float32[Array, "batch k vocab"]) -> Int32[Array, "batch k"]:
    """The lowest id of the largest logit, as jnp.argmax, which XLA for CPU does one by one; any id where one is NaN."""
    is_largest = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_largest, _ids(logits), logits.shape[-1] - 1), axis=-1)


def _is_best(logits: Float32[Array, "batch k vocab"]) -> Bool[Array, "batch k vocab"]:
    return _ids(logits) == _best(logits)[..., None]


def _ids(logits: Float32[Array, "batch k vocab"]) -> Int32[Array, "1 1 vocab"]:
    return jnp.arange(logits.shape[-1])[None, None]


class StepKeys(NamedTuple):
    """Where a step's random numbers come from: each row's own key, and where in the row the step starts.

    A number depends on its row's seed, the step's start position, its index in the block and its purpose; never on the
    row's place in the batch.

    Attributes:
      rngs: a key for each row.
      positions: int32 [batch], the position of each row's newest token.
      noise: float32 [batch, gamma + 1, vocab], the Gumbel noise of each place of the block, which unlike all else
        depends on the absolute position; only for the coupled rule.
      accept: float32 [batch, gamma], the numbers for ACCEPT where a block may turn out narrower than gamma, and shall
        get the same ones; None where they are drawn when asked for.
    """

    rngs: Key[Array, " batch"]
    positions: Int32[Array, " batch"]
    noise: Float32[Array, "batch block vocab"] | None = None
    accept: Float32[Array, "batch gamma"] | None = None


def row_keys(seeds: Int32[Array, " batch"]) -> Key[Array, " batch"]:
    """A key for each row. Not of JAX's default generator: that may be one whose numbers depend on the whole batch."""
    return jax.vmap(lambda seed: jax.random.key(seed, impl="threefry2x32"))(seeds)


def uniforms(keys: StepKeys, purpose: int, num: int) -> Float32[Array, "batch num"]:
    """Uniform draws in [0, 1) for a step, float32 [batch, num]; `purpose` is DRAW, ACCEPT or EXTRA."""
    if keys.accept is not None and purpose == ACCEPT:
        return keys.accept[:, :num]
    rngs = jax.vmap(jax.random.fold_in)(keys.rngs, keys.positions * _PURPOSES + purpose)
    return jax.vmap(lambda rng: jax.random.uniform(rng, (num,), jnp.float32))(rngs)


def gumbel_noise(
    rngs: Key[Array, " batch"], positions: Int32[Array, " batch"], block: int, vocab: int
) -> Float32[Array, "batch block vocab"]:
    """Gumbel noise of `block` absolute positions from a row's own on; the same wherever a step starts."""

    def at(rng: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(rng, position * _PURPOSES + NOISE), (vocab,), jnp.float32)

    places = positions[:, None] + jnp.arange(block)[None]
    return jax.vmap(lambda rng, row: jax.vmap(lambda position: at(rng, position))(row))(rngs, places)


_LANES = 128


def draw(p: Float[Array, "batch vocab"], u: Float[Array, " batch"]) -> Int32[Array, " batch"]:
    """Draws one id per row by inverse CDF.

    Args:
      p: [batch, vocab], non-negative weights; they need not sum to 1.
      u: [batch], uniform in [0, 1).

    Returns:
      int32 [batch], never an id of weight 0 (unless every weight is 0 or NaN: then 0).
    """
    batch, vocab = p.shape
    rows = -(-vocab // _LANES)
    p = jnp.pad(p, ((0, 0), (0, rows * _LANES - vocab))).reshape(batch, rows, _LANES)
    # First the group of ids, then the id within it: a sum over the vocabulary is cheap, a cumulative sum is not.
    totals = jnp.sum(p, axis=-1)
    goal = u * jnp.sum(totals, axis=-1)
    row, below = _crossing(totals, goal)
    within = jnp.take_along_axis(p, row[:, None, None], axis=1)[:, 0]
    lane, _ = _crossing(within, goal - below)
    return row * _LANES + lane


def draw_coupled(p: Float[Array, "*lead vocab"], noise: Float32[Array, "*lead vocab"]) -> Int32[Array, "*lead"]:
    """Draws argmax(log p + noise); two laws that share their noise often draw the same id."""
    return jnp.argmax(jnp.log(p) + noise, axis=-1).astype(jnp.int32)


def _crossing(
    weight: Float[Array, "batch n"], goal: Float[Array, " batch"]
) -> tuple[Int32[Array, " batch"], Float[Array, " batch"]]:
    """First place of positive weight where the running sum passes the goal, and the sum before it.

    Rounding can leave the goal unreached: then the last place of positive weight.
    """
    running = jnp.cumsum(weight, axis=-1)
    positive = weight > 0
    crossed = positive & (running > goal[:, None])
    last = weight.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    place = jnp.where(jnp.any(crossed, axis=-1), jnp.argmax(crossed, axis=-1), last)
    place = jnp.where(jnp.any(positive, axis=-1), place, 0).astype(jnp.int32)
    before = jnp.take_along_axis(running - weight, place[:, None], axis=-1)[:, 0]
    return place, before
