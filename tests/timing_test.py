import time

import pytest

from specdec_jax import timing


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
    assert (a.all_seconds, b.all_seconds) == ((1, 7, 2), (3, 5, 4))
    assert (a.seconds, b.seconds) == (2, 4)  # the first call, which compiles, is not among them
    assert (a.value, b.value) == (7, 8)
    with pytest.raises(ValueError, match="repeats is 0"):
        timing.interleaved([], repeats=0)
