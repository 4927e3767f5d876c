import dataclasses
import time

import jax.numpy as jnp
import pytest

from specdec_jax import timing
from specdec_jax.types import Inputs


def test_interleaved_warms_up_alternates_and_takes_medians(monkeypatch):
    clock, calls = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def function(name, durations):
        remaining = iter(durations)

        def call():
            calls.append(name)
            clock[0] += next(remaining)
            return len(calls)

        return call

    a, b = timing.interleaved([function("a", [99, 1, 7, 2]), function("b", [99, 3, 5, 4])], repeats=3)
    assert "".join(calls) == "ab" + "ab" * 3
    assert (a.seconds, b.seconds) == (2, 4)  # the first call, which compiles, is not among them
    assert (a.value, b.value) == (7, 8)
    with pytest.raises(ValueError, match="repeats is 0"):
        timing.interleaved([], repeats=0)


@dataclasses.dataclass(frozen=True)
class Recorder:
    """A decoder that notes how it is called."""

    seen: list = dataclasses.field(default_factory=list, hash=False, compare=False)
    vocab_size: int = 7

    def prefill(self, params, inputs, cache_length):
        batch = inputs.encoder_tokens.shape[0]
        return jnp.zeros((batch, cache_length)), jnp.zeros((batch, 1), jnp.int32), jnp.zeros((batch,), jnp.int32)

    def extend(self, params, cache, tokens, positions):
        self.seen.append((cache.shape, tokens.shape, positions.shape))
        return jnp.zeros((*tokens.shape, self.vocab_size)) + params, cache + 1


def test_seconds_per_call_times_calls_of_the_given_width():
    one, block = Recorder(vocab_size=7), Recorder(vocab_size=8)
    inputs = Inputs(jnp.ones((1, 4), jnp.int32))
    calls = [timing.Call(one, jnp.float32(0), 1), timing.Call(block, jnp.float32(0), 5)]
    seconds = timing.seconds_per_call(calls, inputs, cache_length=6, repeats=2, calls_per_loop=4)
    assert len(seconds) == 2 and all(0 < s < 1 for s in seconds)
    assert one.seen == [((1, 6), (1, 1), (1,))]  # traced once: the calls are inside one loop
    assert block.seen == [((1, 6), (1, 5), (1,))]


def test_seconds_per_call_divides_by_the_number_of_calls(monkeypatch):
    monkeypatch.setattr(timing, "interleaved", lambda functions, repeats: [timing.Timed(None, 3.0) for _ in functions])
    call = timing.Call(Recorder(), jnp.float32(0), 1)
    inputs = Inputs(jnp.ones((1, 4), jnp.int32))
    assert timing.seconds_per_call([call], inputs, cache_length=6, calls_per_loop=4) == [0.75]
