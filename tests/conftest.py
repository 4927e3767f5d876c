"""Settings of every test: implicit rank promotion is an error, and so is a warning.

Most of a test's time is LLVM's, so its optimizations are off unless XLA_FLAGS says otherwise (`make test-slow` does).
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    for module in ("orbax", "tensorstore", "seqio", "tensorflow", "google", "keras", "transformers", "torch"):
        config.addinivalue_line("filterwarnings", f"ignore:::{module}")
