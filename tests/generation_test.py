import dataclasses

import jax
import jax.numpy as jnp
import mini_pair
import numpy as np
import pytest
import tiny

from specdec_jax import generation, verification
from specdec_jax.checkpoints import t5x
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.settings import RULES, Models, Settings
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
    return generation.Pair(model, target, ModelDrafter(model), draft, VOCABULARY)


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


def test_encode_refuses_what_is_not_text_or_not_an_id():
    with pytest.raises(ValueError, match="^input 2 is not UTF-8"):
        generation.encode(["a", "bad \udcff"], VOCABULARY, Settings(gamma=1))
    with pytest.raises(ValueError, match=r"^forbidden_ids is \(3, 400\); it must be ids below 259"):
        generation.encode(["a"], VOCABULARY, Settings(gamma=1, forbidden_ids=(3, 400)))
    with pytest.raises(ValueError, match="^forbidden_ids holds all of the 259 ids"):
        generation.encode(["a"], VOCABULARY, Settings(gamma=1, forbidden_ids=tuple(range(259))))


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
        ({"max_decode_length": 10**12}, "^max_decode_length is 1000000000000; more than 131072 is surely a mistake"),
        ({"forbidden_ids": (True,)}, r"^forbidden_ids is \(True,\); it must hold ids"),
        ({"draft_temperature": 1e39}, r"^draft_temperature is 1e\+39; it must be 0 to 1e\+06"),
        ({"min_decode_length": -1}, "^min_decode_length is -1; it must be 0 or more"),
        ({"min_decode_length": 65}, "^min_decode_length is 65; it must not be above max_decode_length, 64"),
        ({"draft_temperature": -1.0}, "^draft_temperature is -1.0; it must be 0 to"),
        ({"forbidden_ids": (-1,)}, r"^forbidden_ids is \(-1,\); it must hold ids"),
        ({"rule": "blok"}, "^rule is 'blok'; it must be one of 'token', 'block', 'coupled', or None"),
        ({"rule": "block", "lenience": 0.5}, "^lenience is 0.5 and the rule is block"),
        ({"lenience": 0.0}, "^lenience is 0.0; it must be above 0"),
    ],
)
def test_wrong_settings(wrong, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{"gamma": 1, **wrong})


def test_rules_by_name():
    assert Settings(gamma=1).verification_rule() is verification.block
    assert Settings(gamma=1, lenience=0.5).verification_rule() is verification.token
    for name, rule in RULES.items():
        assert Settings(gamma=1, rule=name).verification_rule() is rule and rule.__name__ == name


def test_the_draft_has_a_temperature_of_its_own(random_pair):
    settings = Settings(gamma=2, temperature=1.0, draft_temperature=0.0, **mini_pair.LIMITS)
    (batch,) = generation.make_batches([[5, 6, 1]], VOCABULARY, settings)
    assert batch.sampling.temperature is not None and batch.draft_sampling.temperature is None
    assert Settings(gamma=2, temperature=1.0).sampling(1, of_draft=True).temperature is not None


def test_constraints_hold_in_every_output(random_pair):
    """Each of them, under the settings that a user gives; the tiny models would break them all."""
    kwargs = {"temperature": 1.0, "min_decode_length": 30, "no_repeat_ngram": 1, "forbidden_ids": tuple(range(3, 200))}
    for output in outputs(random_pair, ["a", "b", "c"], **kwargs):
        assert output.length >= 30 and not set(output.tokens) & set(range(3, 200))
        assert len(set(output.tokens)) == output.length and output.exact


def test_lenience_says_that_it_is_inexact(random_pair):
    lenient, strict = (
        outputs(random_pair, ["a", "b"], temperature=1.0, lenience=lenience, rule="token") for lenience in (0.2, 1.0)
    )
    assert [o.exact for o in lenient] == [False, False] and [o.exact for o in strict] == [True, True]
    accepted = [sum(n * count for o in some for n, count in enumerate(o.accept_counts)) for some in (lenient, strict)]
    calls = [sum(o.num_target_calls for o in some) for some in (lenient, strict)]
    assert accepted[0] / calls[0] > accepted[1] / calls[1]


def test_coupled_outputs_are_those_of_plain_decoding(random_pair):
    kwargs = {"temperature": 1.0, "rule": "coupled"}
    plain = outputs(random_pair, ["a", "b", "c"], generation.decode_plainly, **kwargs)
    for gamma in (1, 5):
        guessed = outputs(random_pair, ["a", "b", "c"], gamma=gamma, **kwargs)
        assert [o.tokens for o in guessed] == [o.tokens for o in plain]
        assert any(o.num_target_calls < o.length for o in guessed)


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
