"""The draft-verify-accept loop (Algorithm 1): speculative decoding; plain decoding is the same loop at gamma 0.

Everything runs inside one jit, in one lax.while_loop over arrays of fixed shapes, with no host round trip. A step makes
gamma draft calls and one target call, and emits 1 to gamma + 1 tokens per row:

    history of a row     start  a   b   c   .   .   .   .        c at the row's position, emitted but not yet run
    draft, gamma = 3                        x1  x2  x3
    target call on                      c   x1  x2  x3           gives p_1 .. p_4
    n = 2 accepted                          x1  x2  t            the row's position moves on by n + 1
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from specdec_jax import verification
from specdec_jax.adaptation import Adaptation, look
from specdec_jax.drafters.base import BlockDrafter, Drafter, DrafterState
from specdec_jax.drafting import Adaptive, propose
from specdec_jax.models.base import Cache, Decoder
from specdec_jax.results import DecodingResult, FinishReason, empty_result
from specdec_jax.sampling import (
    ACCEPT,
    End,
    PointMass,
    Sampling,
    StepKeys,
    constrain,
    log_probabilities,
    row_keys,
    to_probabilities,
    uniforms,
)
from specdec_jax.types import Inputs, Params
from specdec_jax.verdict import Verdict, verify_as_needed
from specdec_jax.verification import Proposal, Target
from specdec_jax.writing import write


class _State(NamedTuple):
    """The loop's carry. `result` is filled in place; its tokens and scores wait in the wider buffers beside it."""

    step: Int32[Array, ""]
    running: Bool[Array, " batch"]
    positions: Int32[Array, " batch"]
    tokens: Int32[Array, "batch capacity"]
    raw: Float32[Array, "batch capacity"]
    standardized: Float32[Array, "batch capacity"]
    cache: Cache
    drafter_state: DrafterState
    result: DecodingResult


def autoregressive_decode(
    target: Decoder,
    target_params: Params,
    inputs: Inputs,
    *,
    max_length: int,
    sampling: Sampling,
    seeds: Int32[Array, " batch"],
    eos_ids: Sequence[int] = (1,),
    rule: verification.Rule = verification.token,
    limits: Int32[Array, " rows"] | None = None,
) -> DecodingResult:
    """Decodes with the target alone: the baseline. For the arguments see `speculative_decode`.

    There is nothing to verify, but `rule=verification.coupled` draws with that rule's noise, and so returns the very
    tokens that speculative decoding with it and the same seeds returns.
    """
    _check(max_length=max_length, gamma=0, eos_ids=eos_ids, seeds=seeds, limits=limits)
    return decode(
        target,
        target_params,
        None,
        None,
        inputs,
        gamma=0,
        max_length=max_length,
        sampling=sampling,
        draft_sampling=sampling,
        seeds=seeds,
        eos_ids=jnp.asarray(eos_ids, jnp.int32),
        rule=rule,
        lenience=1.0,
        limits=limits,
    )


def speculative_decode(
    target: Decoder,
    target_params: Params,
    drafter: Drafter | BlockDrafter,
    draft_params: Params,
    inputs: Inputs,
    *,
    gamma: int,
    max_length: int,
    sampling: Sampling,
    seeds: Int32[Array, " batch"],
    eos_ids: Sequence[int] = (1,),
    draft_sampling: Sampling | None = None,
    rule: verification.Rule | None = None,
    lenience: float | int = 1.0,
    limits: Int32[Array, " rows"] | None = None,
    adaptation: Adaptation | None = None,
) -> DecodingResult:
    """Decodes with guesses of the drafter that the target verifies; the target's own distribution (Theorem in A.1).

    Args:
      target: M_p. Static, as are the drafter, gamma, max_length and the rule: another value compiles anew.
      target_params: its parameters.
      drafter: what guesses.
      draft_params: its parameters.
      inputs: what to decode from, rows padded with 0.
      gamma: guesses per step, at least 1.
      max_length: emitted tokens at most, EOS included.
      sampling: how the target's logits become probabilities.
      seeds: int32 [batch], a row's seed. A row's output depends on its own input and seed alone.
      eos_ids: tokens that end a row; empty to run to max_length.
      draft_sampling: the draft's settings where they shall differ; still exact, q only changes the speed.
      rule: verification.token, block, coupled or a function like them. None is block, or token where lenience is
        below 1.
      lenience: 1 is exact; below 1 accepts more, and no token's probability grows beyond p / lenience (A.5).
      limits: int32 [batch], emitted tokens at most per row, where rows differ in it; max_length still holds for all.
      adaptation: lets each row choose in each step how many guesses it makes, gamma at most; None makes always gamma.

    Returns:
      A DecodingResult.

    Raises:
      ValueError: an argument is out of its range, or the two models do not share a vocabulary.
    """
    if gamma < 1:
        raise ValueError(f"gamma is {gamma}; it must be 1 or more (use autoregressive_decode for no guesses).")
    _check(max_length=max_length, gamma=gamma, eos_ids=eos_ids, seeds=seeds, limits=limits)
    rule = verification.default_rule(lenience) if rule is None else rule
    verification.check_lenience(rule, lenience)
    if adaptation is not None and adaptation.costs.shape != (gamma + 1,):
        raise ValueError(
            f"adaptation.costs has shape {adaptation.costs.shape} and gamma is {gamma}; give the cost of a step of "
            "each number of guesses, 0 to gamma."
        )
    return decode(
        target,
        target_params,
        drafter,
        draft_params,
        inputs,
        gamma=gamma,
        max_length=max_length,
        sampling=sampling,
        draft_sampling=sampling if draft_sampling is None else draft_sampling,
        seeds=seeds,
        eos_ids=jnp.asarray(eos_ids, jnp.int32),
        rule=rule,
        lenience=lenience,
        limits=limits,
        adaptation=adaptation,
    )


def _check(*, max_length: int, gamma: int, eos_ids: Sequence[int], seeds: Array, limits: Array | None) -> None:
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be 1 or more.")
    if gamma > 1000:
        raise ValueError(f"gamma is {gamma}; more than 1000 guesses a step is surely a mistake.")
    if any(eos_id < 0 for eos_id in eos_ids):
        raise ValueError(f"eos_ids is {tuple(eos_ids)}; ids are 0 or more (give () for no EOS).")
    if seeds.ndim != 1:
        raise ValueError(f"seeds has shape {seeds.shape}; give one seed for each row, shape [batch].")
    if limits is not None and (limits.shape != seeds.shape or not jnp.issubdtype(limits.dtype, jnp.integer)):
        raise ValueError(
            f"limits is {limits.dtype} of shape {limits.shape} and seeds has shape {seeds.shape}; give whole "
            "numbers, one for each row."
        )


@functools.partial(jax.jit, static_argnames=("target", "drafter", "gamma", "max_length", "rule"))
def decode(
    target: Decoder,
    target_params: Params,
    drafter: Drafter | BlockDrafter | None,
    draft_params: Params,
    inputs: Inputs,
    *,
    gamma: int,
    max_length: int,
    sampling: Sampling,
    draft_sampling: Sampling,
    seeds: Int32[Array, " batch"],
    eos_ids: Int32[Array, " eos"],
    rule: verification.Rule,
    lenience: float | int | Float32[Array, ""],
    limits: Int32[Array, " rows"] | None = None,
    adaptation: Adaptation | None = None,
) -> DecodingResult:
    """The jitted loop behind both public functions; lower it to read what was compiled."""
    batch = seeds.shape[0]
    capacity = inputs.prefix_length + max_length + gamma + 1
    cache, prompt, positions = target.prefill(target_params, inputs, capacity)
    if prompt.shape[0] != batch:
        raise ValueError(f"seeds has {batch} rows and inputs {prompt.shape[0]}; give one seed for each row.")
    for name, some in (("sampling", sampling), ("draft_sampling", draft_sampling)):
        if some.batch not in (None, batch):
            raise ValueError(f"{name} is for {some.batch} rows and inputs has {batch}; give make_sampling the same.")
    drafter_state = None if drafter is None else drafter.init(draft_params, inputs, capacity)
    end = End(eos_ids, positions)
    sampling, draft_sampling = sampling._replace(end=end), draft_sampling._replace(end=end)
    greedy = sampling.greedy_rows(batch)
    most = jnp.full((batch,), max_length, jnp.int32) if limits is None else jnp.clip(limits, 0, max_length)
    rngs = row_keys(seeds)
    scale = jnp.asarray(lenience, jnp.float32)

    def verify(tokens: Array, keys: StepKeys, block: Array, proposal: Proposal, cache: Cache) -> tuple[Verdict, Cache]:
        # 2. p_1 .. p_{gamma+1} = M_p on the gamma + 1 prefixes, in one call
        logits, cache = target.extend(target_params, cache, block, keys.positions)
        constrained = constrain(logits, sampling, tokens, keys.positions)
        p = to_probabilities(constrained, sampling)
        said = Target(p, constrained, greedy)
        n, extra_token = rule(keys, said, proposal, scale)
        # 5. return prefix + [x_1, .., x_n, t]
        places = jnp.arange(block.shape[1])[None]
        emitted = jnp.where(places < n[:, None], jnp.pad(proposal.tokens, ((0, 0), (0, 1))), extra_token[:, None])
        if isinstance(p, PointMass):
            chosen = jnp.where(emitted == p.tokens, 0.0, -jnp.inf)  # what lenience lets pass has probability 0
        else:
            chosen = jnp.log(verification.at_guesses(p, emitted))
        verdict = Verdict(
            num_accepted=n,
            emitted=emitted,
            raw=log_probabilities(logits, emitted),
            standardized=chosen,
            is_nan=~jnp.isfinite(jnp.max(constrained, axis=-1)),
            beta=verification.beta(said, proposal, scale),
        )
        return verdict, cache

    def step(state: _State) -> _State:
        keys = verification.step_keys(rule, rngs, state.positions, gamma, target.vocab_size)
        adaptive = None
        if adaptation is not None:
            if sampling.temperature is not None:
                keys = keys._replace(accept=uniforms(keys, ACCEPT, gamma))
            outlook = look(adaptation, state.result.beta_sum, state.result.trials)
            adaptive = Adaptive(adaptation, outlook, state.running)
        proposal, tokens, drafter_state = propose(
            drafter,
            draft_params,
            state.drafter_state,
            state.tokens,
            keys,
            gamma,
            draft_sampling,
            target.vocab_size,
            adaptive,
        )
        newest = jnp.take_along_axis(tokens, state.positions[:, None], axis=1)
        block = jnp.concatenate([newest, proposal.tokens], axis=1)
        verify_block = functools.partial(verify, tokens)
        if adaptation is None:
            verdict, cache = verify_block(keys, block, proposal, state.cache)
        else:
            needed = jnp.max(jnp.where(state.running, proposal.num_guesses, 0)) + 1
            verdict, cache = verify_as_needed(verify_block, keys, block, proposal, state.cache, needed)
        n, emitted = verdict.num_accepted, verdict.emitted
        cut = _cut(state, n, emitted, verdict.is_nan, end, most)
        return _State(
            step=state.step + 1,
            running=cut.running,
            positions=state.positions + cut.num_new,
            tokens=write(tokens, emitted, state.positions + 1),
            raw=write(state.raw, verdict.raw, state.positions + 1),
            standardized=write(state.standardized, verdict.standardized, state.positions + 1),
            cache=cache,
            drafter_state=drafter_state,
            result=_count(state, cut, n, proposal, verdict.beta),
        )

    # One slot more than the caches: a row that ended at the limit still runs, and its extra token has to fall behind
    # the last token that counts. A slice that starts too late would be moved back over it.
    slots = jnp.zeros((batch, capacity + 1), jnp.float32)
    state = _State(
        step=jnp.int32(0),
        running=jnp.ones((batch,), bool),
        positions=positions,
        tokens=write(slots.astype(jnp.int32), prompt, jnp.zeros((batch,), jnp.int32)),
        raw=slots,
        standardized=slots,
        cache=cache,
        drafter_state=drafter_state,
        result=empty_result(batch, max_length, gamma, exact=scale == 1),
    )
    state = jax.lax.while_loop(lambda s: jnp.any(s.running), step, state)
    return _finish(state, positions)


class _Cut(NamedTuple):
    """What is left of a step after EOS, the length limit and NaN."""

    num_new: Int32[Array, " batch"]
    running: Bool[Array, " batch"]
    reason: Int32[Array, " batch"]


def _cut(
    state: _State,
    n: Int32[Array, " batch"],
    emitted: Int32[Array, "batch block"],
    is_nan: Bool[Array, "batch block"],
    end: End,
    limits: Int32[Array, " batch"],
) -> _Cut:
    """Ends a row at its first EOS in the block, at NaN, or at the limit; a frozen row emits nothing."""
    block = emitted.shape[1]
    places = jnp.arange(block)[None]
    is_eos = jnp.any(emitted[..., None] == end.eos_ids[None, None], axis=-1)
    to_eos = jnp.min(jnp.where(is_eos, places + 1, block + 1), axis=1)
    before_nan = jnp.min(jnp.where(is_nan, places, block), axis=1)
    room = limits - (state.positions - end.prompt_positions)
    num_new = jnp.minimum(jnp.minimum(n + 1, to_eos), jnp.minimum(before_nan, room))
    num_new = jnp.where(state.running, num_new, 0).astype(jnp.int32)
    eos = to_eos == num_new
    nan = (before_nan == num_new) & (num_new < jnp.minimum(n + 1, room))
    ended = eos | nan | (room == num_new)
    reason = jnp.where(eos, FinishReason.EOS, jnp.where(nan, FinishReason.NAN, FinishReason.LENGTH))
    reason = jnp.where(state.running, reason, state.result.finish_reason).astype(jnp.int32)
    return _Cut(num_new, state.running & ~ended, reason)


def _count(
    state: _State,
    cut: _Cut,
    n: Int32[Array, " batch"],
    proposal: Proposal,
    beta: Float32[Array, "batch gamma"],
) -> DecodingResult:
    """Adds a step to the counters. Counts stop where the row was cut."""
    result, running = state.result, state.running
    gamma = proposal.tokens.shape[1]
    accepted = jnp.minimum(n, cut.num_new)
    extra = cut.num_new - accepted
    rejected = (extra > 0) & (n < proposal.num_guesses)
    trials = accepted + rejected
    beta = jnp.where(jnp.arange(gamma)[None] < trials[:, None], beta, 0.0)
    outcome = (jnp.arange(gamma + 1)[None] == accepted[:, None]) & running[:, None]
    guesses = jnp.where(jnp.arange(gamma)[None] < proposal.num_guesses[:, None], proposal.tokens, -1)
    at = (0, state.step)
    return result._replace(
        finish_reason=cut.reason,
        accept_counts=result.accept_counts + outcome,
        accepted=result.accepted + accepted,
        extra=result.extra + extra,
        drafted=result.drafted + jnp.where(running, proposal.num_guesses, 0),
        trials=result.trials + trials,
        beta_sum=result.beta_sum + jnp.sum(beta, axis=1),
        beta_square_sum=result.beta_square_sum + jnp.sum(beta * beta, axis=1),
        num_target_calls=result.num_target_calls + running,
        step_guesses=jax.lax.dynamic_update_slice(result.step_guesses, guesses[:, None], (*at, 0)),
        step_accepted=jax.lax.dynamic_update_slice(result.step_accepted, jnp.where(running, accepted, -1)[:, None], at),
        step_emitted=jax.lax.dynamic_update_slice(result.step_emitted, cut.num_new[:, None], at),
    )


def _finish(state: _State, prompt_positions: Int32[Array, " batch"]) -> DecodingResult:
    """Takes the emitted part out of the history and pads it."""
    max_length = state.result.tokens.shape[1]
    lengths = state.positions - prompt_positions
    inside = jnp.arange(max_length)[None] < lengths[:, None]

    def emitted(buffer: Array) -> Array:
        take = jax.vmap(lambda row, start: jax.lax.dynamic_slice(row, (start,), (max_length,)))
        return jnp.where(inside, take(buffer, prompt_positions + 1), 0)

    return state.result._replace(
        tokens=emitted(state.tokens),
        lengths=lengths,
        scores=emitted(state.raw),
        standardized_scores=emitted(state.standardized),
    )
