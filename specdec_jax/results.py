"""What decoding returns."""

import enum
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32


class FinishReason(enum.IntEnum):
    """Why a row ended."""

    LENGTH = 0
    EOS = 1
    NAN = 2


class DecodingResult(NamedTuple):
    """What was decoded and how it came about; every array has the batch first.

    `accepted + extra == lengths`. `accepted / drafted` is not alpha: guesses behind a rejection count in it.

    Attributes:
      tokens: int32 [batch, max_length], the emitted tokens, EOS included, then padding 0.
      lengths: int32 [batch], emitted tokens.
      scores: float32 [batch, max_length], the target's raw log-probability of each emitted token; 0 after the end.
      standardized_scores: likewise, under the distribution that was sampled from.
      finish_reason: int32 [batch], a FinishReason.
      accept_counts: int32 [batch, gamma + 1], how many steps had n accepted guesses that were emitted.
      accepted: int32 [batch], emitted tokens that were guesses.
      extra: int32 [batch], emitted tokens that came from the target's own law.
      drafted: int32 [batch], guesses made.
      trials: int32 [batch], guesses tested: those accepted and, per step, the first one rejected.
      beta_sum: float32 [batch], sum over the tested guesses of their probability of acceptance, sum_x min(p, q); with
        lenience, sum_x min(p / lenience, q). That of the token rule, whatever the rule.
      beta_square_sum: float32 [batch], likewise of its square.
      exact: bool [batch], whether the lenience was 1. Below 1 the law is not the target's.
      num_target_calls: int32 [batch], target calls while the row was running.
      step_guesses: int32 [batch, max_length, gamma], the guesses of each step; -1 behind a row's last.
      step_accepted: int32 [batch, max_length], n of each step; -1 where the row had no such step.
      step_emitted: int32 [batch, max_length], tokens emitted in each step.
    """

    tokens: Int32[Array, "batch max_length"]
    lengths: Int32[Array, " batch"]
    scores: Float32[Array, "batch max_length"]
    standardized_scores: Float32[Array, "batch max_length"]
    finish_reason: Int32[Array, " batch"]
    accept_counts: Int32[Array, "batch outcomes"]
    accepted: Int32[Array, " batch"]
    extra: Int32[Array, " batch"]
    drafted: Int32[Array, " batch"]
    trials: Int32[Array, " batch"]
    beta_sum: Float32[Array, " batch"]
    beta_square_sum: Float32[Array, " batch"]
    exact: Bool[Array, " batch"]
    num_target_calls: Int32[Array, " batch"]
    step_guesses: Int32[Array, "batch max_length gamma"]
    step_accepted: Int32[Array, "batch max_length"]
    step_emitted: Int32[Array, "batch max_length"]

    @property
    def alpha(self) -> Float32[Array, " batch"]:
        """The mean of beta over the tested guesses (Corollary 3.6), per row; 0 where none was tested."""
        return self.beta_sum / jnp.maximum(self.trials, 1)

    @property
    def alpha_error(self) -> Float32[Array, " batch"]:
        """The standard error of alpha, as if the betas were independent; 0 where none was tested."""
        trials = jnp.maximum(self.trials, 1)
        variance = jnp.maximum(self.beta_square_sum / trials - self.alpha**2, 0.0)
        return jnp.sqrt(variance / trials)


def empty_result(batch: int, max_length: int, gamma: int, exact: Bool[Array, ""]) -> DecodingResult:
    """Nothing emitted yet."""
    count = jnp.zeros((batch,), jnp.int32)
    per_token = jnp.zeros((batch, max_length), jnp.float32)
    return DecodingResult(
        tokens=per_token.astype(jnp.int32),
        lengths=count,
        scores=per_token,
        standardized_scores=per_token,
        finish_reason=count,
        accept_counts=jnp.zeros((batch, gamma + 1), jnp.int32),
        accepted=count,
        extra=count,
        drafted=count,
        trials=count,
        beta_sum=jnp.zeros((batch,), jnp.float32),
        beta_square_sum=jnp.zeros((batch,), jnp.float32),
        exact=jnp.broadcast_to(exact, (batch,)),
        num_target_calls=count,
        step_guesses=jnp.zeros((batch, max_length, gamma), jnp.int32),
        step_accepted=jnp.full((batch, max_length), -1, jnp.int32),
        step_emitted=per_token.astype(jnp.int32),
    )
