"""The drafting half of a step: up to gamma guesses per row, and q, the law that each was drawn from."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from specdec_jax import verification
from specdec_jax.adaptation import Adaptation, Outlook, chance, find_wanted, shorten
from specdec_jax.drafters.base import BlockDrafter, Drafter, DrafterState
from specdec_jax.sampling import DRAW, PointMass, Sampling, StepKeys, constrain, to_probabilities, uniforms
from specdec_jax.types import Params
from specdec_jax.verification import Proposal
from specdec_jax.writing import write


class Adaptive(NamedTuple):
    """What the number of guesses of this step is chosen by.

    Attributes:
      adaptation: the settings.
      outlook: what is expected of each row.
      running: bool [batch], rows that still decode; the others do not hold them up.
    """

    adaptation: Adaptation
    outlook: Outlook
    running: Bool[Array, " batch"]


class _Guess(NamedTuple):
    """One guess of every row: x, q, None for a point mass, and the draft's confidence, None for no opinion."""

    x: Int32[Array, " batch"]
    q: Float32[Array, "batch vocab"] | None
    confidence: Float32[Array, " batch"] | None


def propose(
    drafter: Drafter | BlockDrafter | None,
    params: Params,
    drafter_state: DrafterState,
    tokens: Int32[Array, "batch capacity"],
    keys: StepKeys,
    gamma: int,
    sampling: Sampling,
    vocab_size: int,
    adaptive: Adaptive | None = None,
) -> tuple[Proposal, Int32[Array, "batch capacity"], DrafterState]:
    """1. for i = 1 .. gamma: q_i = M_q(prefix + x_1 .. x_{i-1}); x_i ~ q_i. Writes the guesses into the history too."""
    batch = tokens.shape[0]
    if drafter is None:
        nothing = Proposal(jnp.zeros((batch, 0), jnp.int32), None, jnp.zeros((batch,), jnp.int32))
        return nothing, tokens, drafter_state
    if isinstance(drafter, BlockDrafter):
        wanted = jnp.full((batch,), gamma, jnp.int32) if adaptive is None else find_wanted(*adaptive)
        proposal, drafter_state = drafter.propose(
            params, drafter_state, tokens, keys.positions, gamma=gamma, wanted=wanted, sampling=sampling, keys=keys
        )
        if proposal.q is not None:
            _check_vocabulary(proposal.q.shape[-1], vocab_size)
            proposal = proposal._replace(num_guesses=_without_nan(proposal.q, proposal.num_guesses))
        if adaptive is not None:
            proposal = shorten(adaptive.adaptation, adaptive.outlook, proposal)
        return proposal, write(tokens, proposal.tokens, keys.positions + 1), drafter_state

    def guess(carry: tuple, i_and_u: tuple, *, first: bool) -> tuple[tuple, _Guess]:
        tokens, drafter_state = carry
        i, u = i_and_u
        positions = keys.positions + i
        logits, drafter_state = drafter.step(params, drafter_state, tokens, positions, first=first)
        confidence = None
        if isinstance(logits, PointMass):
            q = logits
        else:
            _check_vocabulary(logits.shape[-1], vocab_size)
            constrained = constrain(logits[:, None], sampling, tokens, positions)
            q = to_probabilities(constrained, sampling)
            if adaptive is not None:
                confidence = jnp.max(jax.nn.softmax(constrained[:, 0]), axis=-1)
        if isinstance(q, PointMass):
            x, q = q.tokens[:, 0], None
        else:
            q = q[:, 0]
            x = verification.draw_guess(keys, q, u, i)
        tokens = write(tokens, x[:, None], positions + 1)
        return (tokens, drafter_state), _Guess(x, q, confidence)

    u = uniforms(keys, DRAW, gamma).T
    carry, one = guess((tokens, drafter_state), (jnp.int32(0), u[0]), first=True)
    next_guess = functools.partial(guess, first=False)
    if adaptive is not None:
        carry, guesses, num_guesses = _while_worthwhile(next_guess, carry, one, u, adaptive)
    else:
        guesses = jax.tree.map(lambda x: x[None], one)
        if gamma > 1:  # the rest in a loop of its own: the program stays small whatever gamma is
            carry, rest = jax.lax.scan(next_guess, carry, (jnp.arange(1, gamma, dtype=jnp.int32), u[1:]))
            guesses = jax.tree.map(lambda x, more: jnp.concatenate([x, more]), guesses, rest)
        num_guesses = jnp.full((batch,), gamma, jnp.int32)
    qs = None if guesses.q is None else guesses.q.swapaxes(0, 1)
    if qs is not None:
        num_guesses = _without_nan(qs, num_guesses)
    tokens, drafter_state = carry
    confidence = None if guesses.confidence is None else guesses.confidence.T
    return Proposal(guesses.x.T, qs, num_guesses, confidence), tokens, drafter_state


def _check_vocabulary(ids: int, vocab_size: int) -> None:
    if ids != vocab_size:
        raise ValueError(
            f"The draft has a vocabulary of {ids} ids and the target one of {vocab_size}; "
            "use two models with the same vocabulary."
        )


def _without_nan(q: Float32[Array, "batch gamma vocab"], num_guesses: Int32[Array, " batch"]) -> Array:
    """A guess whose q is NaN does not count, nor do those behind it; known before it was drawn, so still exact."""
    return verification.count_accepted(~jnp.isnan(q[..., 0]), num_guesses)


class _Drafted(NamedTuple):
    """What adaptive drafting carries from guess to guess.

    Attributes:
      num_made: guesses made.
      going: bool [batch], rows that want another one. One that does not is dragged along by the others, and its guesses
        do not count, whatever becomes of them: a row must not depend on its batch.
      product: float32 [batch], the chance that all that count stand.
      num_guesses: int32 [batch], those that count.
      guesses: all of them, [gamma, batch, ...].
      history: what the next guess is made from.
    """

    num_made: Int32[Array, ""]
    going: Bool[Array, " batch"]
    product: Float32[Array, " batch"]
    num_guesses: Int32[Array, " batch"]
    guesses: _Guess
    history: tuple


def _while_worthwhile(
    next_guess: Callable[[tuple, tuple], tuple[tuple, _Guess]],
    history: tuple,
    one: _Guess,
    u: Float32[Array, "gamma batch"],
    adaptive: Adaptive,
) -> tuple[tuple, _Guess, Int32[Array, " batch"]]:
    """Guesses until no row finds a further one worthwhile.

    The first call is always made, so that the draft is never more than two tokens behind; whether its guess counts is
    another question.
    """
    adaptation, outlook, running = adaptive
    gamma = len(u)

    def count(drafted: _Drafted, guess: _Guess) -> _Drafted:
        """Takes a guess in, by its q and not by what it is."""
        expected = outlook.alpha if guess.confidence is None else chance(adaptation, outlook.alpha, guess.confidence)
        made, chance_so_far = drafted.num_made, drafted.product
        counts = drafted.going & (chance_so_far * expected > outlook.least_kept[:, made])
        product = jnp.where(counts, chance_so_far * expected, chance_so_far)
        another = product * outlook.alpha > outlook.least[:, jnp.minimum(made + 1, gamma - 1)]
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=made, axis=0)
        return drafted._replace(
            num_made=made + 1,
            going=counts & another,
            product=product,
            num_guesses=drafted.num_guesses + counts,
            guesses=jax.tree.map(put, drafted.guesses, guess),
        )

    def more(drafted: _Drafted) -> _Drafted:
        history, guess = next_guess(drafted.history, (drafted.num_made, u[drafted.num_made]))
        return count(drafted._replace(history=history), guess)

    nothing = _Drafted(
        num_made=jnp.int32(0),
        going=running,
        product=jnp.ones(running.shape, jnp.float32),
        num_guesses=jnp.zeros(running.shape, jnp.int32),
        guesses=jax.tree.map(lambda x: jnp.zeros((gamma, *x.shape), x.dtype), one),
        history=history,
    )
    last = jax.lax.while_loop(lambda d: (d.num_made < gamma) & jnp.any(d.going), more, count(nothing, one))
    return last.history, last.guesses, last.num_guesses
