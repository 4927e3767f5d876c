"""Speculative decoding for T5 in JAX/Flax (Leviathan, Kalman, Matias, arXiv 2211.17192).

    target_params = load_params("checkpoint_1000000")
    target = T5(T5Config.from_params(target_params))
    result = speculative_decode(
        target, target_params, ModelDrafter(draft), draft_params, Inputs(encoder_tokens),
        gamma=7, max_length=128, sampling=make_sampling(batch, temperature=0.0), seeds=seeds,
    )

Importing the package loads neither TensorFlow nor t5x, and a name's module only when the name is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_jax.checkpoints.t5x import CheckpointError, list_steps, load_params, save_checkpoint
    from specdec_jax.decoding import autoregressive_decode, speculative_decode
    from specdec_jax.drafters.base import BlockDrafter, Drafter
    from specdec_jax.drafters.model import ModelDrafter
    from specdec_jax.models.base import Decoder
    from specdec_jax.models.t5 import T5, T5Config
    from specdec_jax.results import DecodingResult, FinishReason
    from specdec_jax.sampling import PointMass, Sampling, make_sampling, standardize
    from specdec_jax.types import Inputs
    from specdec_jax.verification import Proposal, Target
    from specdec_jax.vocabularies import load_vocabulary

_MODULE_OF = {
    "BlockDrafter": "drafters.base",
    "CheckpointError": "checkpoints.t5x",
    "Decoder": "models.base",
    "DecodingResult": "results",
    "Drafter": "drafters.base",
    "FinishReason": "results",
    "Inputs": "types",
    "ModelDrafter": "drafters.model",
    "PointMass": "sampling",
    "Proposal": "verification",
    "Sampling": "sampling",
    "T5": "models.t5",
    "T5Config": "models.t5",
    "Target": "verification",
    "autoregressive_decode": "decoding",
    "list_steps": "checkpoints.t5x",
    "load_params": "checkpoints.t5x",
    "load_vocabulary": "vocabularies",
    "make_sampling": "sampling",
    "save_checkpoint": "checkpoints.t5x",
    "speculative_decode": "decoding",
    "standardize": "sampling",
}

__all__ = [
    "T5",
    "BlockDrafter",
    "CheckpointError",
    "Decoder",
    "DecodingResult",
    "Drafter",
    "FinishReason",
    "Inputs",
    "ModelDrafter",
    "PointMass",
    "Proposal",
    "Sampling",
    "T5Config",
    "Target",
    "autoregressive_decode",
    "list_steps",
    "load_params",
    "load_vocabulary",
    "make_sampling",
    "save_checkpoint",
    "speculative_decode",
    "standardize",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'specdec_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specdec_jax.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
