import dataclasses

import jax
import jax.numpy as jnp
import mini_pair
import numpy as np
import pytest
import tiny

from specdec_jax import generation
from specdec_jax.checkpoints import t5x
from specdec_jax.generation import Models, Settings
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.vocabularies import ByteVocabulary

VOCABULARY = ByteVocabulary()
MINI_TARGET = dict(emb_dim=64, num_heads=4, head_dim=16, mlp_dim=128, num_encoder_layers=3, num_decoder_layers=3)


@pytest.fixture(scope="module")
def pair():
    return generation.load_pair(mini_pair.MODELS, VOCABULARY)


@pytest.fixture(scope="module")
def random_pair():
    """Two tiny models that compile fast and, at temperature 1, write anything."""
    model = tiny.model(vocab=300)
    rng = np.random.default_rng(0)
    target, draft = (
        jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), model.param_shapes())
        for _ in range(2)
    )
    return generation.Pair(model, target, model, draft, VOCABULARY)


def outputs(pair, texts, decode=generation.decode, **kwargs):
    settings = Settings(**{"gamma": 4, "batch_size": 4, **mini_pair.LIMITS, **kwargs})
    batches = generation.make_batches(generation.encode(texts, VOCABULARY, settings), VOCABULARY, settings)
    return [
        output
        for batch in batches
        for output in generation.read_outputs(decode(pair, batch, settings), batch, VOCABULARY)
    ]


@pytest.mark.parametrize("decode", [generation.decode, generation.decode_plainly])
def test_greedy_outputs_and_scores_are_those_of_t5x(pair, decode):
    expected = mini_pair.greedy_outputs()
    found = outputs(pair, [e["inputs"]["inputs_pretokenized"] for e in expected], decode)
    assert len(found) == len(expected) == 11  # three batches of 4, the last one filled up with a copy
    for output, wanted in zip(found, expected, strict=True):
        assert output.text == wanted["prediction"]
        assert output.tokens == wanted["prediction_tokens"]
        assert output.length == len(output.tokens) == len(output.scores)
        assert sum(output.scores) == pytest.approx(wanted["aux"]["scores"], abs=2e-4)
        assert sum(output.accept_counts) == output.num_target_calls
        assert output.finish_reason == "eos"


def test_rows_depend_on_their_index_and_not_on_the_batch_size(random_pair):
    texts = ["blue", "blue", "west green", "blue", "sun"]
    together = outputs(random_pair, texts, gamma=1, temperature=1.0)
    alone = outputs(random_pair, texts, gamma=1, temperature=1.0, batch_size=1)
    assert [o.tokens for o in together] == [o.tokens for o in alone]
    assert len({tuple(together[i].tokens) for i in (0, 1, 3)}) == 3  # equal inputs, other draws
    assert outputs(random_pair, texts, gamma=1, temperature=1.0, seed=1)[0].tokens != together[0].tokens


def test_ids_beyond_the_vocabulary_are_never_drawn(random_pair):
    drawn = [t for o in outputs(random_pair, ["blue"] * 8, gamma=1, temperature=100.0) for t in o.tokens]
    assert len(drawn) > 100 and max(drawn) < VOCABULARY.size < random_pair.target.vocab_size


def test_row_seeds():
    seeds = [generation.row_seed(seed, i) for seed in range(10) for i in range(100)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize(
    ("length", "limit", "padded"), [(1, 512, 32), (32, 512, 32), (33, 512, 64), (200, 512, 256), (200, 220, 220)]
)
def test_padded_length(length, limit, padded):
    assert generation.padded_length(length, limit) == padded


def test_encode_adds_the_prefix_and_the_end():
    settings = Settings(gamma=1, task_prefix="to: ", max_input_length=7)
    assert generation.encode(["ab"], VOCABULARY, settings) == [[*VOCABULARY.encode("to: ab"), 1]]
    with pytest.raises(ValueError, match=r"^max_input_length is 7; input 2 has 8 tokens, its task prefix and end"):
        generation.encode(["ab", "abc"], VOCABULARY, settings)


@pytest.mark.parametrize(("texts", "message"), [([], "no input"), (["a", " "], "input 2 is empty")])
def test_encode_refuses_nothing(texts, message):
    with pytest.raises(ValueError, match=message):
        generation.encode(texts, VOCABULARY, Settings(gamma=1))


def test_a_short_batch_is_filled_with_copies():
    settings = Settings(gamma=1, batch_size=3)
    first, last = generation.make_batches([[5, 1], [6, 7, 1], [8, 1], [9, 1]], VOCABULARY, settings)
    assert (first.num_rows, last.num_rows) == (3, 1)
    assert first.inputs.encoder_tokens.shape == last.inputs.encoder_tokens.shape == (3, 32)
    np.testing.assert_array_equal(first.inputs.encoder_tokens[1, :4], [6, 7, 1, 0])
    np.testing.assert_array_equal(last.inputs.encoder_tokens[:, :2], [[9, 1]] * 3)
    assert len(set(last.seeds.tolist())) == 1 and last.seeds[0] == generation.row_seed(0, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gamma": 0}, "^gamma is 0; it must be 1 or more"),
        ({"temperature": -1.0}, "^temperature is -1"),
        ({"top_p": 0.0}, "^top_p is 0"),
        ({"top_k": -1}, "^top_k is -1"),
        ({"seed": -1}, "^seed is -1"),
        ({"batch_size": 0}, "^batch_size is 0"),
        ({"max_decode_length": 0}, "^max_decode_length is 0"),
    ],
)
def test_wrong_settings(wrong, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{"gamma": 1, **wrong})


def test_wrong_dtype():
    with pytest.raises(ValueError, match="^dtype is 'float16'; it must be 'float32', 'bfloat16' or None"):
        Models(target_checkpoint="t", draft_checkpoint="d", vocabulary="bytes", dtype="float16")


def test_dtype_and_config(pair):
    config = T5Config(vocab_size=384, **MINI_TARGET)
    model, params = generation.load_model(mini_pair.TARGET, config, "bfloat16")
    assert model.config == dataclasses.replace(config, dtype="bfloat16") and pair.target.config == config
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(pair.target_params)} == {"float32"}
    wrong = T5Config(vocab_size=384, **{**MINI_TARGET, "mlp_dim": 256})
    with pytest.raises(ValueError, match=r"has shape \[64, 128\], where \[64, 256\] is expected"):
        generation.load_model(mini_pair.TARGET, wrong)


def test_vocabularies_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match="the vocabulary has 459 ids and the model .*1500 only 384 rows"):
        generation.load_pair(mini_pair.MODELS, ByteVocabulary(extra_ids=200))
    other = tiny.model(vocab=300)
    weights = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), other.param_shapes())
    checkpoint = t5x.save_checkpoint(tmp_path, weights, step=0)
    models = Models(target_checkpoint=mini_pair.TARGET, draft_checkpoint=checkpoint, vocabulary="bytes")
    with pytest.raises(ValueError, match="checkpoint_0 has a vocabulary of 300 rows and the target .* one of 384"):
        generation.load_pair(models, VOCABULARY)


def test_not_a_t5(tmp_path):
    checkpoint = t5x.save_checkpoint(tmp_path, {"decoder": {"kernel": np.zeros((2, 2), np.float32)}}, step=0)
    with pytest.raises(ValueError, match="checkpoint_0: These are not a T5's parameters"):
        generation.load_model(checkpoint)


def test_t5_is_a_plain_static_argument(pair):
    assert hash(pair.target) == hash(T5(pair.target.config))
