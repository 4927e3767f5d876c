"""t5x's TrainStateInitializer, which also tells the model where its weights will lie."""

from typing import Any

from t5x import utils  # pyright: ignore[reportMissingImports]


class TrainStateInitializer(utils.TrainStateInitializer):
    """Tells a SpeculativeEncoderDecoderModel the mesh, so that it can place its draft.

    Bind it as infer's or evaluate's train_state_initializer_cls.
    """

    def __init__(self, optimizer_def: Any, init_fn: Any, input_shapes: Any, partitioner: Any, input_types: Any = None):
        init_fn.__self__.place(partitioner)
        super().__init__(optimizer_def, init_fn, input_shapes, partitioner, input_types)
