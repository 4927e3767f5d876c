"""A draft model that is itself made faster by a cheaper drafter: speculation at two levels, exact at both.

The draft model's own guesses come out of an inner draft-verify-accept loop, so they follow its law, and q is that law:
its standardized p at each place, never a residual, from which single tokens of the inner loop may have been drawn.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from specdec_jax import verification
from specdec_jax.drafters.base import BlockDrafter, Drafter, DrafterState
from specdec_jax.drafting import propose
from specdec_jax.models.base import Cache, Decoder
from specdec_jax.sampling import PointMass, Sampling, StepKeys, constrain, to_probabilities
from specdec_jax.types import Inputs, Params
from specdec_jax.verification import Proposal, Target
from specdec_jax.writing import write

_INNER = 2**31 - 1  # tells the inner loop's random keys from the outer one's


class _State(NamedTuple):
    """The inner loop's carry: how many guesses each row has, and everything that goes with them."""

    done: Int32[Array, " batch"]
    tokens: Int32[Array, "batch capacity"]
    q: Float32[Array, "batch guesses vocab"] | None
    cache: Cache
    inner_state: DrafterState


@dataclasses.dataclass(frozen=True)
class HierarchicalDrafter:
    """Drafts with a model whose own decoding is speculative; its parameters are the pair (model's, inner drafter's).

    Attributes:
      model: the draft model, the middle one of three.
      inner: what guesses for it.
      inner_gamma: guesses of the inner drafter per call of the model.
    """

    model: Decoder
    inner: Drafter | BlockDrafter
    inner_gamma: int

    def __post_init__(self) -> None:
        if self.inner_gamma < 1:
            raise ValueError(f"inner_gamma is {self.inner_gamma}; it must be 1 or more.")
        if not isinstance(self.inner, Drafter):
            raise ValueError(
                f"inner is {type(self.inner).__name__}, which proposes blocks; give a drafter with step()."
            )

    def init(self, params: tuple[Params, Params], inputs: Inputs, cache_length: int) -> tuple[Cache, DrafterState]:
        """See `Drafter.init`."""
        length = cache_length + 2 * self.inner_gamma + 1
        return self.model.prefill(params[0], inputs, length)[0], self.inner.init(params[1], inputs, length)

    def propose(
        self,
        params: tuple[Params, Params],
        state: tuple[Cache, DrafterState],
        tokens: Int32[Array, "batch capacity"],
        positions: Int32[Array, " batch"],
        *,
        gamma: int,
        wanted: Int32[Array, " batch"],
        sampling: Sampling,
        keys: StepKeys,
    ) -> tuple[Proposal, tuple[Cache, DrafterState]]:
        """See `BlockDrafter.propose`.

        Rows that have the guesses wanted wait for the others, and change no more. What the inner loop makes beyond
        those does not count: whether it is there depends on what was drawn.
        """
        model, inner, (model_params, inner_params), k = self.model, self.inner, params, self.inner_gamma
        assert isinstance(inner, Drafter)
        batch, vocab = tokens.shape[0], model.vocab_size
        fold = jax.vmap(jax.random.fold_in)
        # Keys of its own in every outer step: a number that drew a guess must not draw another one behind it.
        rngs = fold(fold(keys.rngs, jnp.full((batch,), _INNER)), positions)
        greedy = sampling.greedy_rows(batch)
        rule, noise = verification.token, None
        if keys.noise is not None:  # what is drawn behind the last guess is of no interest, and needs none
            rule, noise = verification.coupled, jnp.pad(keys.noise, ((0, 0), (0, 2 * k + 1), (0, 0)))

        def step(carry: _State) -> _State:
            at = positions + carry.done
            own = StepKeys(rngs, at, None if noise is None else _window(noise, carry.done, k + 1))
            # After the outer step two tokens are new to the inner drafter, and after its own last one a third.
            _, inner_state = inner.step(
                inner_params, carry.inner_state, carry.tokens, jnp.maximum(at - 1, 0), first=True
            )
            proposal, tokens, inner_state = propose(
                inner, inner_params, inner_state, carry.tokens, own, k, sampling, vocab
            )
            # The last guess of a step was never run, so the block starts one token earlier; see ModelDrafter.
            start = jnp.maximum(at - 1, 0)
            logits, cache = model.extend(model_params, carry.cache, _window(tokens, start, k + 2), start)
            constrained = constrain(_window(logits, at - start, k + 1), sampling, tokens, at)
            p = to_probabilities(constrained, sampling)
            n, extra = rule(own, Target(p, constrained, greedy), proposal, jnp.float32(1))
            places = jnp.arange(k + 1)[None]
            emitted = jnp.where(places < n[:, None], jnp.pad(proposal.tokens, ((0, 0), (0, 1))), extra[:, None])
            running = carry.done < wanted
            tokens = jnp.where(running[:, None], write(tokens, emitted, at + 1), carry.tokens)
            q = carry.q
            if q is not None and not isinstance(p, PointMass):
                q = jnp.where(running[:, None, None], write(q, p, carry.done), q)
            return _State(jnp.where(running, carry.done + n + 1, carry.done), tokens, q, cache, inner_state)

        everything: Any = None
        if sampling.temperature is not None:
            everything = jnp.zeros((batch, gamma + k + 1, vocab), jnp.float32)
        wide = jnp.pad(tokens, ((0, 0), (0, 2 * k + 1)))
        first = _State(jnp.zeros((batch,), jnp.int32), wide, everything, *state)
        last = jax.lax.while_loop(lambda carry: jnp.any(carry.done < wanted), step, first)
        guesses = _window(last.tokens, positions + 1, gamma)
        q = None if last.q is None else last.q[:, :gamma]
        return Proposal(guesses, q, wanted), (last.cache, last.inner_state)


def _window(x: Array, starts: Int32[Array, " batch"], size: int) -> Array:
    """So many entries of each row, from its own start on."""
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size))(x, starts)
