"""t5x's InteractiveModel with a draft."""

import functools
from typing import Any

from t5x import interactive_model  # pyright: ignore[reportMissingImports]

from specdec_jax.t5x_adapter.model import SpeculativeEncoderDecoderModel
from specdec_jax.t5x_adapter.restore import restore_draft


class SpeculativeInteractiveModel(interactive_model.InteractiveModel):
    """An InteractiveModel whose predict_with_aux decodes speculatively.

    InteractiveModel builds its RestoreCheckpointConfig itself and leaves no way to give it a state transformation;
    here it is given one while it is built, in which time the process must build no other. Like InteractiveModel it
    reads native checkpoints of the target, with an optimizer's state; the draft's may be any.
    """

    def __init__(self, *, model: Any, partitioner: Any, draft_checkpoint_path: str, dtype: str | None, **kwargs: Any):
        """Restores target and draft.

        Args:
          model: a SpeculativeEncoderDecoderModel, with this partitioner.
          partitioner: t5x's partitioner.
          draft_checkpoint_path: the draft's checkpoint, native or Orbax.
          dtype: of the weights that are restored, target and draft.
          **kwargs: InteractiveModel's other arguments.
        """
        if not isinstance(model, SpeculativeEncoderDecoderModel):
            raise ValueError(f"model is a {type(model).__name__}; it must be a SpeculativeEncoderDecoderModel.")
        original = interactive_model.utils.RestoreCheckpointConfig
        transformation = functools.partial(restore_draft, path=draft_checkpoint_path, dtype=dtype)
        interactive_model.utils.RestoreCheckpointConfig = functools.partial(
            original, state_transformation_fns=[transformation]
        )
        try:
            super().__init__(model=model, partitioner=partitioner, dtype=dtype, **kwargs)
        finally:
            interactive_model.utils.RestoreCheckpointConfig = original
