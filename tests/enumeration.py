"""The exact law of what a rule emits, enumerated in float64 from the rule's own pieces."""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import verification
from specdec_jax.verification import Proposal

Law = Callable[[tuple[int, ...]], np.ndarray]
"""A model: the probabilities of the next token after a prefix, float64 [vocab]."""


def random_model(seed: int, vocab: int, zeros: float = 0.3) -> Law:
    """A random table over prefixes, with zeros in it."""

    @functools.cache
    def law(prefix: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng((seed, len(prefix), *prefix))
        p = rng.dirichlet(np.ones(vocab)) * (rng.random(vocab) >= zeros)
        if p.sum() == 0:
            p[rng.integers(vocab)] = 1.0
        return p / p.sum()

    return law


def token_outcomes(p, proposal, q_guess):
    """P(n) for n = 0 .. gamma, and the law of the extra token at each n, of every row; the token rule."""
    one = jnp.float64(1)
    accept = verification.accept_probability(verification.at_guesses(p, proposal.tokens), q_guess, one)
    counts = jnp.arange(accept.shape[1])[None] < proposal.num_guesses[:, None]
    accept = jnp.where(counts, accept, 0.0)
    reach = jnp.cumprod(jnp.pad(accept, ((0, 0), (1, 0)), constant_values=1.0), axis=1)
    stop = 1 - jnp.pad(accept, ((0, 0), (0, 1)))
    return reach * stop, lambda n: verification.extra_law(p, proposal, n)


def block_outcomes(p, proposal, q_guess):
    """The same of the block rule."""
    weights = verification.block_weights(verification.at_guesses(p, proposal.tokens), q_guess)
    h = verification.block_accept_probability(weights, p, proposal)
    counts = jnp.arange(h.shape[1])[None] < proposal.num_guesses[:, None]
    h = jnp.where(counts, h, 0.0)
    none_behind = jnp.cumprod((1 - h)[:, ::-1], axis=1)[:, ::-1]  # that no guess from i on passes
    passes = jnp.pad(h, ((0, 0), (1, 0)), constant_values=1.0)
    probability = passes * jnp.pad(none_behind, ((0, 0), (0, 1)), constant_values=1.0)

    def extra(n):
        return verification.extra_law(p, proposal, n, jnp.take_along_axis(weights, n[:, None], axis=1)[:, 0])

    return probability, extra


OUTCOMES = {"token": token_outcomes, "block": block_outcomes}


@functools.partial(jax.jit, static_argnames="rule")
def outcomes(rule, p, proposal, q_guess):
    """P(n) of every row, [rows, gamma + 1], and the extra token's law at every n, [gamma + 1, rows, vocab]."""
    probability, extra_law = OUTCOMES[rule](p, proposal, q_guess)
    rows = jnp.zeros(len(p), jnp.int32)
    return probability, jnp.stack([extra_law(rows + n) for n in range(p.shape[1])])


def step_law(
    rule: str, target: Law, draft: Law, prefix: tuple[int, ...], gamma: int, num_guesses: int, point_mass: bool = False
) -> dict[tuple[int, ...], float]:
    """What one step emits after a prefix: {emitted tokens: probability}."""
    vocab = len(target(prefix))
    blocks = np.array(list(itertools.product(range(vocab), repeat=gamma)), np.int32)
    p = np.stack([[target((*prefix, *g[:i])) for i in range(gamma + 1)] for g in blocks.tolist()])
    q = np.stack([[draft((*prefix, *g[:i])) for i in range(gamma)] for g in blocks.tolist()])
    if point_mass:  # the draft says its likeliest token, and means it
        q = np.eye(vocab)[q.argmax(-1)]
    q_guess = np.take_along_axis(q, blocks[..., None], axis=-1)[..., 0]
    drawn = np.prod(q_guess, axis=1)  # guesses behind the last that counts are drawn too, and must not matter
    proposal = Proposal(jnp.asarray(blocks), None if point_mass else jnp.asarray(q), jnp.full(len(p), num_guesses))
    probability, extra_laws = (np.asarray(x) for x in outcomes(rule, jnp.asarray(p), proposal, jnp.asarray(q_guess)))
    assert probability.dtype == extra_laws.dtype == np.float64
    law: dict[tuple[int, ...], float] = {}
    for n in range(num_guesses + 1):
        weight = (drawn * probability[:, n])[:, None] * extra_laws[n]
        for guesses, row in zip(blocks[:, :n].tolist(), weight, strict=True):
            for t in np.flatnonzero(row):
                key = (*guesses, int(t))
                law[key] = law.get(key, 0.0) + row[t]
    return law


def sequence_law(step: Callable[[tuple[int, ...]], dict], length: int) -> dict[tuple[int, ...], float]:
    """The law of the first `length` tokens, steps following one another; `step` gives the law of one after a prefix."""
    done: dict[tuple[int, ...], float] = {}
    open_prefixes = {(): 1.0}
    while open_prefixes:
        # The shortest first, so that every prefix is gone on from once.
        prefix = min(open_prefixes, key=len)
        reached = open_prefixes.pop(prefix)
        for emitted, probability in step(prefix).items():
            key = (*prefix, *emitted)
            into, key = (done, key[:length]) if len(key) >= length else (open_prefixes, key)
            into[key] = into.get(key, 0.0) + reached * probability
    return done


def target_law(target: Law, length: int) -> dict[tuple[int, ...], float]:
    """The law of the first `length` tokens of the target alone."""
    law = {(): 1.0}
    for _ in range(length):
        law = {(*s, t): w * p for s, w in law.items() for t, p in enumerate(target(s)) if w * p > 0}
    return law
