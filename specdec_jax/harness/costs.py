"""What the parts of decoding cost: the paper's c, the cost of verification, and what the loop adds to its calls.

Every part runs inside one jitted loop, each call depending on the one before, over caches of decoding's own shapes.
A loop is timed with few and with many iterations, in turn with all others; the difference, per iteration, has neither
the start of the program in it nor its compilation. Numbers are kept per round, so that ratios are of times that were
measured side by side.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from specdec_jax import verification
from specdec_jax.adaptation import Adaptation
from specdec_jax.decoding import decode
from specdec_jax.drafters.base import BlockDrafter, Drafter
from specdec_jax.generation import Batch
from specdec_jax.models.base import Decoder
from specdec_jax.results import DecodingResult
from specdec_jax.sampling import End, Sampling, StepKeys, row_keys
from specdec_jax.settings import Settings
from specdec_jax.timing import Timed, interleaved, timed
from specdec_jax.types import Inputs, Params

_SECONDS_PER_LOOP = 0.15
_FEW, _MOST = 4, 1000


class Workload(NamedTuple):
    """What is decoded, and how.

    Attributes:
      target: M_p.
      target_params: its parameters.
      drafter: what guesses.
      draft_params: its parameters.
      inputs: one batch.
      sampling: the target's settings.
      draft_sampling: the draft's.
      seeds: int32 [batch].
      gamma: guesses per step.
      max_length: emitted tokens at most.
      rule: of verification.
      lenience: 1 is exact.
      adaptation: of adaptive gamma; None for gamma guesses in every step.
    """

    target: Decoder
    target_params: Params
    drafter: Drafter | BlockDrafter
    draft_params: Params
    inputs: Inputs
    sampling: Sampling
    draft_sampling: Sampling
    seeds: Int32[Array, " batch"]
    gamma: int
    max_length: int
    rule: verification.Rule
    lenience: float | int = 1.0
    adaptation: Adaptation | None = None

    @property
    def capacity(self) -> int:
        """Slots of the caches, as decoding makes them."""
        return self.inputs.prefix_length + self.max_length + self.gamma + 1

    def run(self, *, limit: Any, gamma: int | None = None, eos_ids: Sequence[int] = ()) -> DecodingResult:
        """Decodes up to `limit` tokens, one for all rows or one each; no end of their own unless eos_ids are given."""
        gamma = self.gamma if gamma is None else gamma
        plain = gamma == 0
        return decode(
            self.target,
            self.target_params,
            None if plain else self.drafter,
            None if plain else self.draft_params,
            self.inputs,
            gamma=gamma,
            max_length=self.max_length,
            sampling=self.sampling,
            draft_sampling=self.sampling if plain else self.draft_sampling,
            seeds=self.seeds,
            eos_ids=jnp.asarray(eos_ids, jnp.int32),
            rule=verification.token if plain and self.rule is not verification.coupled else self.rule,
            lenience=1.0 if plain else self.lenience,
            limits=jnp.broadcast_to(jnp.asarray(limit, jnp.int32), self.seeds.shape),
            adaptation=None if plain else self.adaptation,
        )


def workload(
    target: Decoder,
    target_params: Params,
    drafter: Drafter | BlockDrafter,
    draft_params: Params,
    batch: Batch,
    settings: Settings,
) -> Workload:
    """What `generation.decode` decodes, to be timed."""
    return Workload(
        target=target,
        target_params=target_params,
        drafter=drafter,
        draft_params=draft_params,
        inputs=batch.inputs,
        sampling=batch.sampling,
        draft_sampling=batch.draft_sampling,
        seeds=batch.seeds,
        gamma=settings.gamma,
        max_length=settings.max_decode_length,
        rule=settings.verification_rule(),
        lenience=settings.lenience,
        adaptation=settings.adaptive(),
    )


class Costs(NamedTuple):
    """Seconds of each part, one entry per round; entry i of one belongs with entry i of another.

    Attributes:
      gamma: guesses per step.
      target_one: a target call of one token.
      target_block: a target call of gamma + 1 tokens.
      draft_one: a draft call of one token.
      draft_two: a step's first draft call, of two tokens.
      bodies: a step's calls in one loop, without what comes between them: the first draft call, gamma - 1 others, and
        the target call of gamma + 1 tokens.
      step: a step of the speculative loop.
      plain_step: a step of plain decoding.
      prefill_target: the target's encoder and what else comes before the first step.
      prefill_draft: the draft's.
    """

    gamma: int
    target_one: list[float]
    target_block: list[float]
    draft_one: list[float]
    draft_two: list[float]
    bodies: list[float]
    step: list[float]
    plain_step: list[float]
    prefill_target: list[float]
    prefill_draft: list[float]

    @property
    def c(self) -> float:
        """A draft call in target calls (Definition 3.7)."""
        return ratio(self.draft_one, self.target_one)

    @property
    def verification(self) -> float:
        """A target call of gamma + 1 tokens in target calls of one; the paper takes it as 1."""
        return ratio(self.target_block, self.target_one)

    @property
    def calls_alone(self) -> list[float]:
        """A step's calls, each timed alone: draft_two + (gamma - 1) draft_one + target_block."""
        rows = zip(self.draft_two, self.draft_one, self.target_block, strict=True)
        return [two + (self.gamma - 1) * one + block for two, one, block in rows]

    @property
    def efficiency_alone(self) -> float:
        """The calls, each timed alone, over the step."""
        return ratio(self.calls_alone, self.step)

    @property
    def loop_efficiency(self) -> float:
        """The calls in one loop over the step: what is missing to 1 went into standardizing, drawing and accepting.

        The calls share caches of the processor, so that together they take longer than each alone; `interplay` says
        by how much.
        """
        return ratio(self.bodies, self.step)

    @property
    def interplay(self) -> float:
        """The calls, each timed alone, over the same calls in one loop; below 1: they evict each other's weights."""
        return ratio(self.calls_alone, self.bodies)

    @property
    def overhead(self) -> float:
        """Seconds of a step that are not its calls: standardizing, drawing, accepting, bookkeeping."""
        return statistics.median(step - bodies for step, bodies in zip(self.step, self.bodies, strict=True))

    @property
    def plain_efficiency(self) -> float:
        """A target call of one token over a step of plain decoding."""
        return ratio(self.target_one, self.plain_step)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def measure(work: Workload, *, rounds: int) -> Costs:
    """Measures everything, all parts in turn in each round.

    Args:
      work: what is decoded, and how; it decides the shapes.
      rounds: how often each part is timed.

    Raises:
      ValueError: `rounds` is below 1, or max_length leaves nothing to time.
    """
    if work.max_length < 4 * (work.gamma + 1):
        raise ValueError(
            f"max_length is {work.max_length}; to time steps of up to {work.gamma + 1} tokens it must be "
            f"{4 * (work.gamma + 1)} or more."
        )
    target_alone = {"target": work.target, "target_params": work.target_params}
    draft_alone = {"drafter": work.drafter, "draft_params": work.draft_params}
    loops = {
        "target_one": _Calls(**target_alone, block=1),
        "target_block": _Calls(**target_alone, block=work.gamma + 1),
        "draft_one": _Calls(**draft_alone, ones=1),
        "draft_two": _Calls(**draft_alone, first=True),
        "bodies": _Calls(**target_alone, **draft_alone, first=True, ones=work.gamma - 1, block=work.gamma + 1),
    }
    slopes = {name: _calls_slope(work, calls) for name, calls in loops.items()}
    slopes |= {"step": _steps_slope(work, work.gamma), "plain_step": _steps_slope(work, 0)}
    prefill = functools.partial(_prefill, inputs=work.inputs, capacity=work.capacity)
    starts = {
        "prefill_target": lambda: prefill(work.target, work.target_params),
        "prefill_draft": lambda: prefill(work.drafter, work.draft_params),
    }
    seconds = _seconds(list(slopes.values()), list(starts.values()), rounds=rounds)
    return Costs(gamma=work.gamma, **dict(zip([*slopes, *starts], seconds, strict=True)))


def measure_calls(work: Workload, widths: Sequence[int], *, rounds: int) -> tuple[list[list[float]], list[float]]:
    """Seconds of target calls of several widths, and of a guess, per round.

    Args:
      work: what is decoded; its gamma plays no part but in the caches' size.
      widths: tokens of a target call.
      rounds: how often each is timed, in turn.

    Returns:
      Per width the seconds of a call in each round, and the same of a draft call; of a drafter that proposes blocks, of
      a block over its gamma guesses, drawing included.
    """
    target = {"target": work.target, "target_params": work.target_params}
    slopes = [_calls_slope(work, _Calls(**target, block=width)) for width in widths]
    at_once = work.gamma if isinstance(work.drafter, BlockDrafter) else 0
    draft_calls = _Calls(
        drafter=work.drafter, draft_params=work.draft_params, ones=0 if at_once else 1, at_once=at_once
    )
    *blocks, draft = _seconds([*slopes, _calls_slope(work, draft_calls)], [], rounds=rounds)
    return blocks, [seconds / max(at_once, 1) for seconds in draft]


def measure_steps(works: Sequence[Workload], *, rounds: int) -> list[list[float]]:
    """Seconds of a step of each loop, per round; with gamma 0 of plain decoding."""
    return _seconds([_steps_slope(work, work.gamma) for work in works], [], rounds=rounds)


class _Slope(NamedTuple):
    """The same loop with few and with many iterations."""

    few: Callable[[], Any]
    many: Callable[[], Any]
    iterations: Callable[[Any], int]

    def per_iteration(self, few: Timed, many: Timed) -> list[float]:
        """Seconds of one iteration, per round.

        Where a busy machine made the longer loop the faster one, its time over all of its iterations, start included.
        """
        some, all_ = self.iterations(few.value), self.iterations(many.value)
        return [
            (b - a) / (all_ - some) if b > a else b / all_
            for a, b in zip(few.all_seconds, many.all_seconds, strict=True)
        ]


def _seconds(slopes: Sequence[_Slope], calls: Sequence[Callable[[], Any]], *, rounds: int) -> list[list[float]]:
    """Seconds per round: of an iteration of each slope, then of each call, all timed in turn."""
    found = interleaved([*(f for slope in slopes for f in (slope.few, slope.many)), *calls], repeats=rounds)
    of_slopes, of_calls = found[: 2 * len(slopes)], found[2 * len(slopes) :]
    pairs = zip(slopes, of_slopes[::2], of_slopes[1::2], strict=True)
    return [*(slope.per_iteration(few, many) for slope, few, many in pairs), *(list(t.all_seconds) for t in of_calls)]


class _Calls(NamedTuple):
    """The calls of one iteration: the draft's first, one-token ones, a block, the target's; 0 or None for none."""

    target: Decoder | None = None
    target_params: Params = None
    drafter: Drafter | BlockDrafter | None = None
    draft_params: Params = None
    first: bool = False
    ones: int = 0
    at_once: int = 0
    block: int = 0


def _calls_slope(work: Workload, calls: _Calls) -> _Slope:
    def run(num: int) -> Any:
        arrays = {"target_params": calls.target_params, "draft_params": calls.draft_params, "inputs": work.inputs}
        arrays |= {"sampling": work.draft_sampling, "seeds": work.seeds}
        static = {name: getattr(calls, name) for name in ("target", "drafter", "first", "ones", "at_once", "block")}
        return _loop(**arrays, **static, capacity=work.capacity, num=num)

    jax.block_until_ready(run(_FEW))  # compiles
    few, twice = (min(timed(lambda n=n: run(n)).seconds for _ in range(2)) for n in (_FEW, 2 * _FEW))
    one = max((twice - few) / _FEW, few / 1000, 1e-6)
    many = _FEW + max(_FEW, min(_MOST, round(_SECONDS_PER_LOOP / one)))
    return _Slope(lambda: (run(_FEW), _FEW), lambda: (run(many), many), lambda result: result[1])


def _steps_slope(work: Workload, gamma: int) -> _Slope:
    few, many = 2 * (gamma + 1), work.max_length
    return _Slope(
        lambda: work.run(limit=few, gamma=gamma),
        lambda: work.run(limit=many, gamma=gamma),
        lambda result: int(jnp.max(result.num_target_calls)),
    )


@functools.partial(jax.jit, static_argnames=("model", "capacity"))
def _prefill(model: Any, params: Params, *, inputs: Inputs, capacity: int) -> Any:
    return (
        model.prefill(params, inputs, capacity) if hasattr(model, "prefill") else model.init(params, inputs, capacity)
    )


def _after(x: Int32[Array, "batch length"], result: Any) -> Int32[Array, "batch length"]:
    """The tokens as they are, but only once a call's result is there; XLA can take nothing of the call away."""
    leaf = jax.tree.leaves(jax.lax.optimization_barrier(result))[0]
    never = jnp.any(leaf.reshape(leaf.shape[0], -1)[:, :1] == -98765, axis=1, keepdims=True)
    return x ^ never.astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("target", "drafter", "first", "ones", "at_once", "block", "capacity"))
def _loop(
    *,
    target: Decoder | None,
    target_params: Params,
    drafter: Drafter | BlockDrafter | None,
    draft_params: Params,
    inputs: Inputs,
    sampling: Sampling,
    seeds: Int32[Array, " batch"],
    first: bool,
    ones: int,
    at_once: int,
    block: int,
    capacity: int,
    num: Int32[Array, ""] | int,
) -> Int32[Array, "batch capacity"]:
    assert inputs.encoder_tokens is not None
    batch = inputs.encoder_tokens.shape[0]
    cache = None if target is None else target.prefill(target_params, inputs, capacity)[0]
    state = None if drafter is None else drafter.init(draft_params, inputs, capacity)
    places = capacity - ones - at_once - 1 - block  # where all of an iteration's calls fit
    sampling = sampling._replace(end=End(jnp.zeros((1,), jnp.int32), jnp.zeros((batch,), jnp.int32)))
    rngs = row_keys(seeds)

    def draft(carry: tuple, positions: Array, *, is_first: bool) -> tuple:
        assert isinstance(drafter, Drafter)
        tokens, state = carry
        logits, state = drafter.step(draft_params, state, tokens, positions, first=is_first)
        return _after(tokens, logits), state

    def iteration(i: Array, carry: tuple) -> tuple:
        tokens, state, cache = carry
        positions = jnp.full((batch,), 1 + i % places, jnp.int32)
        if first:
            tokens, state = draft((tokens, state), positions, is_first=True)
        if ones:
            more = functools.partial(draft, is_first=False)
            each = positions[None] + jnp.arange(ones, dtype=jnp.int32)[:, None]
            (tokens, state), _ = jax.lax.scan(lambda c, at: (more(c, at), None), (tokens, state), each)
        if at_once:
            assert isinstance(drafter, BlockDrafter)
            keys = StepKeys(rngs, positions)
            wanted = jnp.full((batch,), at_once, jnp.int32)
            proposal, state = drafter.propose(
                draft_params, state, tokens, positions, gamma=at_once, wanted=wanted, sampling=sampling, keys=keys
            )
            tokens = _after(tokens, proposal)
        if target is not None:
            newest = jax.lax.dynamic_slice_in_dim(tokens, positions[0], block, axis=1)
            logits, cache = target.extend(target_params, cache, newest, positions)
            tokens = _after(tokens, logits)
        return tokens, state, cache

    tokens = jnp.zeros((batch, capacity + 1), jnp.int32)
    return jax.lax.fori_loop(0, num, iteration, (tokens, state, cache))[0]
