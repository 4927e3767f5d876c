"""The whole algorithm once more, a row at a time, in NumPy and float64, with lists for histories.

Only the random numbers are the package's own.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.sampling import ACCEPT, DRAW, EXTRA, StepKeys, gumbel_noise, uniforms

Logits = Callable[[list[int]], np.ndarray]
"""A model: the history, start token included, to the next token's logits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row's settings; see `make_sampling`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_length: int = 0
    forbidden_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0


def standardize(logits: np.ndarray, history: list[int], row: Row, eos_ids: tuple[int, ...]) -> np.ndarray:
    """Logits after a history, whose first token was given, to probabilities."""
    logits = np.asarray(logits, np.float64).copy()
    vocab = len(logits)
    for token in set(history):
        factor = np.float64(np.float32(row.repetition_penalty))
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    if n := row.no_repeat_ngram:
        grams = {tuple(history[i : i + n]) for i in range(len(history) - n + 1)}
        for token in range(vocab):
            if (*history[len(history) - n + 1 :], token) in grams:
                logits[token] = -np.inf
    if len(history) - 1 < row.min_length:
        logits[list(eos_ids)] = -np.inf
    logits[list(row.forbidden_ids)] = -np.inf
    if row.temperature < 1e-4:
        return np.eye(vocab)[np.argmax(logits)]
    p = np.exp((logits - logits.max()) / np.float64(np.float32(row.temperature)))
    order = sorted(range(vocab), key=lambda i: (-p[i], i))
    keep = order[: row.top_k] if row.top_k else order
    p = normalized(np.where(np.isin(np.arange(vocab), keep), p, 0))
    if row.top_p < 1:
        keep, reached = [], 0.0
        for i in order:
            if reached < np.float64(np.float32(row.top_p)):
                keep.append(i)
            reached += p[i]
        p = normalized(np.where(np.isin(np.arange(vocab), keep), p, 0))
    return normalized(np.where(p >= np.float64(np.float32(row.min_p)) * p.max(), p, 0))


def normalized(weight: np.ndarray) -> np.ndarray:
    return weight / weight.sum()


def draw(p: np.ndarray, u: float) -> int:
    """Inverse CDF."""
    reached = 0.0
    for token, weight in enumerate(p):
        reached += weight
        if weight > 0 and u * p.sum() < reached:
            return token
    return int(np.flatnonzero(p)[-1])


def decode(
    target: Logits,
    draft: Logits,
    start: int,
    seed: int,
    rule: str,
    row: Row,
    *,
    gamma: int,
    max_length: int,
    eos_ids: tuple[int, ...],
) -> list[int]:
    """The emitted tokens of one row."""
    history = [start]
    rngs = jax.vmap(jax.random.key)(jnp.asarray([seed]))
    while True:
        position = len(history) - 1
        keys = StepKeys(rngs, jnp.asarray([position], jnp.int32))
        vocab = len(target(history))
        noise = np.asarray(gumbel_noise(rngs, keys.positions, gamma + 1, vocab), np.float64)[0]
        u = {purpose: np.asarray(uniforms(keys, purpose, gamma), np.float64)[0] for purpose in (DRAW, ACCEPT)}
        guesses, qs = [], []
        for i in range(gamma):
            q = standardize(draft(history + guesses), history + guesses, row, eos_ids)
            guesses.append(coupled_draw(q, noise[i]) if rule == "coupled" else draw(q, u[DRAW][i]))
            qs.append(q)
        ps = [standardize(target(history + guesses[:i]), history + guesses[:i], row, eos_ids) for i in range(gamma + 1)]
        if rule == "coupled":
            own = [coupled_draw(p, g) for p, g in zip(ps, noise, strict=True)]
            n = next((i for i in range(gamma) if guesses[i] != own[i]), gamma)
            extra = own[n]
        else:
            n, law = {"token": token_rule, "block": block_rule}[rule](ps, qs, guesses, u[ACCEPT])
            extra = draw(law, float(uniforms(keys, EXTRA, 1)[0, 0]))
        for token in [*guesses[:n], extra]:
            history.append(token)
            if token in eos_ids or len(history) - 1 == max_length:
                return history[1:]


def coupled_draw(p: np.ndarray, noise: np.ndarray) -> int:
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(p) + noise))


def token_rule(ps, qs, guesses, r):
    """n and the law of the extra token, by Algorithm 1."""
    for i, x in enumerate(guesses):
        if not r[i] * qs[i][x] < ps[i][x]:
            return i, normalized(np.maximum(0, ps[i] - qs[i]))
    return len(guesses), ps[-1]


def block_rule(ps, qs, guesses, eta):
    """The same by block verification."""
    gamma, weights = len(guesses), [1.0]
    for p, q, x in zip(ps, qs, guesses, strict=False):
        weights.append(min(1.0, weights[-1] * p[x] / q[x]))
    n = 0
    for i in range(1, gamma + 1):
        if i == gamma:
            h = weights[gamma]
        else:
            above = np.maximum(0, weights[i] * ps[i] - qs[i]).sum()
            h = above / (above + 1 - weights[i]) if above + 1 - weights[i] > 0 else 1.0
        if eta[i - 1] < h:
            n = i
    return n, ps[-1] if n == gamma else normalized(np.maximum(0, weights[n] * ps[n] - qs[n]))
