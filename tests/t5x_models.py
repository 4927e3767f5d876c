"""t5x's models of the mini pair, stock and speculative; import it only where t5x is."""

import functools

import jax
import jax.numpy as jnp
import seqio
from flax.core import freeze
from t5x import adafactor, checkpoints, decoding, models, partitioning, utils
from t5x.examples.t5 import network

from specdec_jax.t5x_adapter import SpeculativeEncoderDecoderModel

LENGTH = 24
VOCABULARY = seqio.ByteVocabulary()
COMMON = {"vocab_size": 384, "head_dim": 16, "mlp_activations": ("gelu", "linear"), "dropout_rate": 0.0}


def module(emb_dim=64, num_heads=4, layers=3, mlp_dim=128, **changes):
    layers = {"num_encoder_layers": layers, "num_decoder_layers": layers}
    sizes = {"emb_dim": emb_dim, "num_heads": num_heads, "mlp_dim": mlp_dim}
    return network.Transformer(network.T5Config(**COMMON | layers | sizes | changes))


draft_module = functools.partial(module, 32, 2, 1, 64)


def sampling(**bindings):
    return functools.partial(decoding.temperature_sample, **{"topk": 0, "rescale_log_probs": False} | bindings)


def make(stock=False, **kwargs):
    own = {} if stock else {"draft_module": draft_module()}
    kwargs = {"module": module(), "decode_fn": sampling(temperature=0.0)} | own | kwargs
    optimizer = adafactor.Adafactor(logical_factor_rules=adafactor.standard_logical_factor_rules())
    model = models.EncoderDecoderModel if stock else SpeculativeEncoderDecoderModel
    return model(input_vocabulary=VOCABULARY, output_vocabulary=VOCABULARY, optimizer_def=optimizer, **kwargs)


def train_state_initializer(model, length=LENGTH):
    """t5x's own, for a batch of 4, with an optimizer; and the partitioner."""
    shapes = {name: (4, length) for name in ("encoder_input_tokens", "decoder_input_tokens")}
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    return (
        utils.TrainStateInitializer(model.optimizer_def, model.get_initial_variables, shapes, partitioner),
        partitioner,
    )


def with_optimizer(directory, target, params, step=0):
    """Writes a checkpoint as t5x.train does, which the mini pair's are not: they have no optimizer's state."""
    with jax.numpy_rank_promotion("allow"):
        initializer, partitioner = train_state_initializer(make(stock=True, module=target))
        state = (
            initializer.from_scratch(jax.random.PRNGKey(0)).replace_params(freeze(params)).replace_step(jnp.int32(step))
        )
        checkpoints.Checkpointer(initializer.global_train_state_shape, partitioner, str(directory)).save(state)
    return str(directory / f"checkpoint_{step}")
