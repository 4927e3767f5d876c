"""What t5x's gin launches import: an unmodified t5x.infer or t5x.eval that decodes speculatively.

    python -m t5x.infer --gin_file=... --gin_file=gin/t5x/draft_t5_1_1_small.gin --gin.DRAFT_CHECKPOINT_PATH="'...'"

Nothing else in the package imports this one, and nothing but this one needs t5x. Its parts that do not need it can be
imported without it: a name's module is loaded when the name is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_jax.t5x_adapter.interactive import SpeculativeInteractiveModel
    from specdec_jax.t5x_adapter.metrics import speculation
    from specdec_jax.t5x_adapter.model import SpeculativeEncoderDecoderModel
    from specdec_jax.t5x_adapter.restore import restore_draft
    from specdec_jax.t5x_adapter.tasks import text_file_task

_MODULE_OF = {
    "SpeculativeEncoderDecoderModel": "model",
    "SpeculativeInteractiveModel": "interactive",
    "restore_draft": "restore",
    "speculation": "metrics",
    "text_file_task": "tasks",
}

__all__ = [
    "SpeculativeEncoderDecoderModel",
    "SpeculativeInteractiveModel",
    "restore_draft",
    "speculation",
    "text_file_task",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'specdec_jax.t5x_adapter' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specdec_jax.t5x_adapter.{_MODULE_OF[name]}"), name)
