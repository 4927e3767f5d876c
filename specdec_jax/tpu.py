"""What T5 decoding costs on a TPU, found without one: by compiling for it and reading what the compiler says.

libtpu compiles for topologies that are not there. Of each program, the real ones of this package, it tells the memory
that it needs, the schedule, and for every operation in it the cycles that it expects. A time here is

    max(cycles / clock, bytes that must be read / bandwidth)

since an estimate of cycles leaves out waiting for memory. It is the compiler's estimate and nobody's measurement.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specdec_jax import theory
from specdec_jax.tpu_compiler import Compiler, Estimate, Options, TooLargeError
from specdec_jax.tpu_topology import version

T5X_STEP = {"small": 0.63e-3, "base": 1.52e-3, "large": 4.22e-3, "xxl": 49.2e-3}
"""Seconds of t5x's own decoding step by the same estimate: one v4 chip, bfloat16, one row, one token, inputs of 512
tokens, 160 slots, default layouts. A third of xxl's are copies of weights, which t5x's loop may hoist."""


class Cell(NamedTuple):
    """A draft and gamma of a task, at an acceptance.

    Attributes:
      draft: its size.
      gamma: guesses per step.
      alpha: acceptance.
    """

    draft: str
    gamma: int
    alpha: float


LARGEST = {"batch_size": 2**12, "max_decode_length": 2**14}
"""Sizes of which `measure` finds the largest that fits, and where it stops looking."""


def measure(
    options: Options,
    cells: Sequence[Cell] = (),
    *,
    largest: bool = False,
    report: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Compiles everything and says what it costs.

    Args:
      options: what.
      cells: what else to predict the speedup of, with the same target.
      largest: whether to find the sizes that just fit, too.
      report: told what is being compiled.

    Returns:
      A document of plain values, times in seconds: programs by name; c, verification and step of the configured pair;
      cells; and the largest sizes by name.

    Raises:
      ValueError: libtpu is not there, does not know the topology, or gives no estimates.
    """
    compiler = Compiler(options)
    target, draft = compiler.model(options.target_size, target=True), compiler.model(options.draft_size, target=False)
    programs: dict[str, Estimate] = {}

    def add(name: str, make: Callable[[], Estimate]) -> Estimate:
        if name not in programs:
            report(name)
            programs[name] = make()
        return programs[name]

    def call(size: str, model: Any, block: int) -> float:
        return add(f"{size} {block} token{'s' if block > 1 else ''}", lambda: compiler.call(model, block)).seconds

    def calls(size: str, model: Any, gamma: int) -> tuple[float, float]:
        """A step's draft calls, and its target call."""
        drafting = call(size, model, 2) + (gamma - 1) * call(size, model, 1)
        return drafting, call(options.target_size, target, gamma + 1)

    speculative = add("speculative step", lambda: compiler.decoding(target, draft, options.gamma))
    plain = add("plain step", lambda: compiler.decoding(target, draft, 0))
    for size, model in ((options.target_size, target), (options.draft_size, draft)):
        add(f"{size} prefill", functools.partial(compiler.prefill, model))
    one = call(options.target_size, target, 1)
    drafting, verifying = calls(options.draft_size, draft, options.gamma)

    predicted = []
    for cell in cells:
        model = compiler.model(cell.draft, target=False)
        step = sum(calls(cell.draft, model, cell.gamma))
        gain = theory.tokens_per_step(cell.alpha, cell.gamma) * plain.seconds / step
        t5x = T5X_STEP.get(options.target_size) if _is_t5x_setting(options) else None
        over_t5x = None if t5x is None else gain * t5x / plain.seconds
        c = call(cell.draft, model, 1) / plain.seconds
        predicted.append({**cell._asdict(), "c": c, "predicted": gain, "predicted_over_t5x": over_t5x})
    return {
        "estimate": "of the compiler; nothing ran on a TPU",
        "libtpu": version(),
        "options": {k: v for k, v in dataclasses.asdict(options).items() if k != "sizes"},
        "programs": {name: _document(estimate) for name, estimate in programs.items()},
        "c": call(options.draft_size, draft, 1) / one,
        "verification": verifying / one,
        "verification_over_floor": verifying / programs[f"{options.target_size} {options.gamma + 1} tokens"].floor,
        "plain_over_floor": plain.seconds / plain.floor,
        "step_over_calls": speculative.seconds / (drafting + verifying),
        "plain_tokens_per_second": options.batch_size / plain.seconds,
        "cells": predicted,
        **({name: _find_largest(name, compiler, speculative, report) for name in LARGEST} if largest else {}),
    }


def _find_largest(name: str, compiler: Compiler, now: Estimate, report: Callable[[str], None]) -> int:
    """A size of the speculative loop that fits a chip, nearly the largest.

    Memory is taken to grow along a line; what that says is compiled, with a tenth off, and halved while it does not fit
    after all.
    """
    options = compiler.options
    target, draft = compiler.model(options.target_size, target=True), compiler.model(options.draft_size, target=False)
    first, unit = getattr(options, name), options.mesh[0] if name == "batch_size" else 1

    def memory(size: int) -> int | None:
        report(f"{name} {size}, for its memory")
        try:
            return compiler.resized(**{name: size}).decoding(target, draft, options.gamma).hbm_bytes
        except TooLargeError:
            return None

    def upto(size: int) -> int:
        size = min(size, LARGEST[name])
        return size - size % unit

    second = upto(8 * first)
    more = memory(second) if second > first else None
    if more is None:
        return first
    each = max(more - now.hbm_bytes, 1) / (second - first)
    third = upto(int(0.9 * (first + (compiler.chip.hbm - now.hbm_bytes) / each)))
    while third > second and memory(third) is None:
        third = upto(third // 2)
    return max(third, second)


def _is_t5x_setting(options: Options) -> bool:
    known = Options(sizes=options.sizes, target_size=options.target_size, draft_size=options.draft_size)
    fields = ("topology", "batch_size", "max_input_length", "dtype")
    return all(getattr(options, name) == getattr(known, name) for name in fields)


def _document(estimate: Estimate) -> dict[str, Any]:
    derived = {name: getattr(estimate, name) for name in ("hbm_bytes", "computing", "linking", "floor", "seconds")}
    values = estimate._asdict() | {"cycles": dict(estimate.cycles), "chip": estimate.chip._asdict()}
    return {**derived, **values}
