"""Settings of every test: implicit rank promotion is an error, and so is a warning."""

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    for module in ("orbax", "tensorstore", "seqio", "tensorflow", "google", "keras", "transformers", "torch"):
        config.addinivalue_line("filterwarnings", f"ignore:::{module}")
