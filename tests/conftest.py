"""Settings of every test: implicit rank promotion is an error, and so is a warning.

Most of a test's time is the compiler's, so it is told to hurry unless XLA_FLAGS says otherwise (`make test-slow` does).
An XLA that does not know a flag aborts, so those that change most are only given to the versions that know them.
"""

import importlib.metadata
import os

_FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # a third of the compile time
    _FLAGS.append("--xla_cpu_parallel_codegen_split_count=1")  # else a program is cut up for threads that are not there
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    _FLAGS.append("--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    for module in ("orbax", "tensorstore", "seqio", "tensorflow", "google", "keras", "transformers", "torch"):
        config.addinivalue_line("filterwarnings", f"ignore:::{module}")


@pytest.fixture
def float64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Forgets compiled programs before there are too many: each maps memory, and a process may have 65530 mappings."""
    yield
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            num_maps = sum(1 for _ in maps)
    except OSError:
        return
    if num_maps > 25_000:
        jax.clear_caches()
