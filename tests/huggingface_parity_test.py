"""T5 1.1 and 1.0 against Hugging Face's, with random weights: another implementation of the same model."""

import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import huggingface
from specdec_jax.models.layers import relative_bucket
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.types import Inputs

torch = pytest.importorskip("torch", reason="torch is not installed: there is no Hugging Face T5 to compare with")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: there is no Hugging Face T5 to compare with"
)

VOCAB, EMB, HEADS, HEAD_DIM, MLP, ENCODER_LAYERS, DECODER_LAYERS = 50, 16, 3, 4, 24, 2, 3
ENCODER_LENGTHS = (150, 40, 1)  # beyond 128 all distances share a bucket
forward = jax.jit(
    lambda model, *args: model.forward(*args),
    static_argnums=0,
    compiler_options={"xla_backend_optimization_level": 0},  # compiles in half the time
)


def huggingface_t5(version):
    """A random model."""
    gated = version == "1.1"
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=EMB,
        d_kv=HEAD_DIM,
        d_ff=MLP,
        num_layers=ENCODER_LAYERS,
        num_decoder_layers=DECODER_LAYERS,
        num_heads=HEADS,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=not gated,
        dropout_rate=0.0,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    if gated and model.lm_head.weight is model.shared.weight:
        # Since version 5, transformers ties a fresh 1.1 model too; only a checkpoint with both weights unties it. What
        # tie_word_embeddings=False still does there is to leave the decoder's output unscaled.
        model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB, EMB))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layer_norm" in name:
                weight.normal_(mean=1.0, std=0.2)
            elif "shared" in name or "relative_attention_bias" in name:
                weight.normal_()
            else:
                weight.normal_(std=weight.shape[1] ** -0.5)
    is_tied = model.lm_head.weight is model.shared.weight
    assert is_tied != gated
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight is model.shared.weight
    return model


@functools.cache
def pair(version):
    theirs = huggingface_t5(version)
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        params, model = huggingface.load_params(directory), T5(huggingface.read_config(directory))
    assert model.config == T5Config.from_params(params)
    assert model.config.logits_via_embedding == (version == "1.0")
    assert model.config.mlp_activations == (("relu",) if version == "1.0" else ("gelu", "linear"))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, model.param_shapes())
    return theirs, model, params


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    encoder_tokens = rng.integers(1, VOCAB, (3, max(ENCODER_LENGTHS)), dtype=np.int32)
    is_text = np.arange(max(ENCODER_LENGTHS)) < np.asarray(ENCODER_LENGTHS)[:, None]
    decoder_tokens = rng.integers(1, VOCAB, (3, 140), dtype=np.int32)
    decoder_tokens[:, 0] = 0
    return np.where(is_text, encoder_tokens, 0), decoder_tokens


def their_logits(theirs, decoder_length):
    encoder_tokens, decoder_tokens = inputs()
    with torch.no_grad():
        return theirs(
            input_ids=torch.from_numpy(encoder_tokens).long(),
            attention_mask=torch.from_numpy(encoder_tokens > 0),
            decoder_input_ids=torch.from_numpy(decoder_tokens[:, :decoder_length]).long(),
        ).logits.numpy()


@pytest.mark.parametrize("decoder_length", [1, 12, 140])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_logits_are_huggingface_s(version, decoder_length):
    theirs, model, params = pair(version)
    encoder_tokens, decoder_tokens = (jnp.asarray(tokens) for tokens in inputs())
    expected = their_logits(theirs, decoder_length)
    assert expected.std() > 0.5  # or the tolerance would say nothing
    found = forward(model, params, encoder_tokens, decoder_tokens[:, :decoder_length])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_a_cached_block_s_logits_are_huggingface_s():
    theirs, model, params = pair("1.1")
    encoder_tokens, decoder_tokens = (jnp.asarray(tokens) for tokens in inputs())

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def block(params):
        given = Inputs(encoder_tokens, decoder_tokens[:, 1:131])
        cache, _, positions = model.prefill(params, given, 140)
        return model.extend(params, cache, decoder_tokens[:, 130:138], positions)[0]

    np.testing.assert_allclose(block(params), their_logits(theirs, 138)[:, 130:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 60)])
def test_buckets_are_huggingface_s(bidirectional, num_buckets, max_distance):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5", reason="this transformers has no modeling_t5")
    settings = {"bidirectional": bidirectional, "num_buckets": num_buckets, "max_distance": max_distance}
    distances = np.arange(-1000, 1001)
    expected = t5.T5Attention._relative_position_bucket(torch.from_numpy(distances), **settings)
    np.testing.assert_array_equal(relative_bucket(distances, **settings), expected.numpy())
