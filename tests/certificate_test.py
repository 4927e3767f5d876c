import dataclasses
import json

import jax
import jax.numpy as jnp
import mini_pair
import numpy as np
import pytest
import scipy.stats
import tiny

from specdec_jax import certificate, cli, generation
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.settings import Settings
from specdec_jax.vocabularies import ByteVocabulary

VOCABULARY = ByteVocabulary()
SETTINGS = Settings(gamma=2, **mini_pair.LIMITS)
TEXTS = ["a", "bc"]


@pytest.fixture(scope="module")
def pair():
    """Two tiny models that hardly agree."""
    model = tiny.model(vocab=300)
    return generation.Pair(
        model, tiny.params(model, 0, 3.0), ModelDrafter(model), tiny.params(model, 1, 3.0), VOCABULARY
    )


def encoded(texts):
    return generation.encode(texts, VOCABULARY, SETTINGS)


def quiet(*_):
    pass


@pytest.mark.parametrize("rule", ["block", pytest.param("coupled", marks=pytest.mark.slow)])
def test_a_correct_decoder_passes(pair, rule):
    settings = dataclasses.replace(SETTINGS, rule=rule)
    shares = []
    found = certificate.verify(
        pair,
        TEXTS,
        encoded(TEXTS),
        settings,
        num_sequences=1024,
        num_laws=1,
        report=lambda name, share: shares.append((name, share)),
    )
    assert found.passed and found.laws[0].sequences == 1024 and found.laws[0].impossible == 0
    assert 1 < found.laws[0].outcomes <= 27 and found.greedy.inputs == 2 and found.greedy.unexplained == 0
    assert ("law of input 1 of 1", 1.0) in shares and shares[-1] == ("greedy outputs", 1.0)
    told = json.loads(json.dumps(found.as_dict()))
    assert told["passed"] and told["settings"]["rule"] == rule and told["environment"]["jax"] == jax.__version__
    assert found.lines()[-1] == "PASSED"


def test_a_wrong_decoder_fails(pair, monkeypatch):
    """The draft's own output, claimed to be the target's."""
    draft_alone = pair._replace(target_params=pair.draft_params)
    monkeypatch.setattr(
        generation, "decode", lambda _, batch, settings: generation.decode_plainly(draft_alone, batch, settings)
    )
    law = certificate.check_law(pair, "a", encoded(["a"])[0], SETTINGS, 512, quiet)
    greedy = certificate.check_greedy(pair, encoded(TEXTS), SETTINGS, quiet)
    assert law.p_value < 1e-6 and greedy.unexplained > 0


def test_one_outcome_shows_little(pair):
    settings = dataclasses.replace(SETTINGS, temperature=0.001)
    found = certificate.verify(pair, TEXTS, encoded(TEXTS), settings, num_sequences=128, num_laws=1, report=quiet)
    assert found.laws[0].degrees == 0 and found.laws[0].temperature == 0.001 and found.laws[0].detectable == 1.0
    assert found.passed  # one outcome is possible, and no other was seen
    assert any("one outcome is possible" in line for line in found.lines())
    rare = found._replace(laws=[dataclasses.replace(found.laws[0], outcomes=2)])
    assert not rare.passed and rare.verdict == "INCONCLUSIVE" and any("inconclusive" in line for line in rare.lines())


def test_no_law_is_a_mistake_of_the_settings(pair):
    settings = dataclasses.replace(SETTINGS, forbidden_ids=tuple(i for i in range(259) if i != 1), min_decode_length=2)
    with pytest.raises(ValueError, match="the settings leave no id: there is no law"):
        certificate.check_law(pair, "a", encoded(["a"])[0], settings, 128, quiet)


def test_the_law_is_that_of_all_beginnings(pair):
    settings = dataclasses.replace(SETTINGS, temperature=0.7, top_k=3, max_decode_length=3, batch_size=9)
    (batch,) = generation.make_batches([encoded(["a"])[0]] * 9, VOCABULARY, settings)
    law, border = certificate.exact_law(pair, batch)
    assert border > 0
    assert abs(sum(law.values()) - 1) < 1e-5 and max(map(len, law)) == 3
    assert all(VOCABULARY.eos_id not in tokens[:-1] for tokens in law)
    assert all(len(tokens) == 3 or tokens[-1] == VOCABULARY.eos_id for tokens in law)


def test_chi_square_is_scipys():
    law = {(i,): p for i, p in enumerate([0.5, 0.3, 0.19, 0.006, 0.004])}
    seen = {(0,): 510, (1,): 280, (2,): 199, (3,): 7, (4,): 4}
    found = certificate.chi_square(law, seen, excuse=False)
    # 6 expected of (3,) stand alone; the 4 of (4,) are too few for a cell, and join the smallest one
    alone = scipy.stats.chisquare([510, 280, 199, 7 + 4], [500, 300, 190, 6 + 4])
    assert found.degrees == 3 and found.statistic == pytest.approx(alone.statistic, rel=1e-5)
    assert found.p_value == pytest.approx(scipy.stats.chi2.sf(found.statistic, 3), rel=1e-3)


def test_an_impossible_outcome_has_no_excuse():
    law, seen = {(0,): 0.5, (1,): 0.5}, {(0,): 50, (1,): 49, (2,): 1}
    found = certificate.chi_square(law, seen, excuse=False)
    assert found.impossible == 1 and found.p_value == 0.0
    assert certificate.chi_square(law, seen, excuse=True).p_value > 0.1  # where rounding decides what is possible


@pytest.mark.parametrize(("degrees", "total"), [(5, 500), (26, 2048)])
def test_what_is_detectable_is_detected(degrees, total):
    """Laws at that total variation from a uniform one are rejected nearly always, and closer ones are not."""
    rng = np.random.default_rng(0)
    d = certificate.detectable(degrees, total)
    p = np.full(degrees + 1, 1 / (degrees + 1))
    critical = scipy.stats.chi2.isf(certificate.SIGNIFICANCE, degrees)
    for share, least, most in [(1.0, 0.97, 1.0), (0.3, 0.0, 0.3)]:
        half = (degrees + 1) // 2
        shift = np.zeros(degrees + 1)
        shift[:half], shift[-half:] = share * d / half, -share * d / half
        counts = rng.multinomial(total, p + shift, size=1000)
        statistics = ((counts - total * p) ** 2 / (total * p)).sum(1)
        assert least <= np.mean(statistics > critical) <= most


def test_nobody_certifies_lenience(pair):
    settings = dataclasses.replace(SETTINGS, lenience=0.5)
    with pytest.raises(ValueError, match="lenience is 0.5; only 1 is exact"):
        certificate.verify(pair, TEXTS, encoded(TEXTS), settings, num_sequences=1, num_laws=1, report=quiet)


OPTIONS = [
    "verify",
    "--gin_file=configs/generate.gin",
    f"--gin.TARGET_CHECKPOINT='{mini_pair.TARGET}'",
    f"--gin.DRAFT_CHECKPOINT='{mini_pair.DRAFT}'",
    "--gin.VOCABULARY='bytes'",
    "--gin.MAX_DECODE_LENGTH=32",
    "--gin.MAX_INPUT_LENGTH=32",
    "--gin.TEMPERATURE=4.0",
    "--sequences=256",
    "--laws=1",
    "blue",
]


def test_command(capsys, monkeypatch):
    assert cli.main([*OPTIONS, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] and told["laws"][0]["text"] == "blue" and told["models"]["vocabulary"] == "bytes"
    assert cli.main(OPTIONS) == 0
    assert capsys.readouterr().out.endswith("PASSED\n")

    def wrong(pair, batch, settings):
        result = generation.decode_plainly(pair, batch, settings)
        return result._replace(tokens=jnp.where(result.tokens == result.tokens[0, 0], 9, result.tokens))

    monkeypatch.setattr(generation, "decode", wrong)
    assert cli.main(OPTIONS) == 1
    assert capsys.readouterr().out.endswith("FAILED\n")
    assert cli.main([*OPTIONS, "--sequences=0"]) == 2
    assert cli.main([*OPTIONS, "--gin.LENIENCE=0.5"]) == 2
    assert "LENIENCE is 0.5; only 1 is exact" in capsys.readouterr().err


def test_a_config_that_was_checked_is_part_of_the_certificate(capsys):
    """Its dtype has no JSON of its own."""
    sizes = "emb_dim = 64", "num_heads = 4", "head_dim = 16", "mlp_dim = 128", "vocab_size = 384"
    layers = "num_encoder_layers = 3", "num_decoder_layers = 3"
    bindings = [f"--gin.T5Config.{line.replace(' ', '')}" for line in (*sizes, *layers)]
    assert cli.main([*OPTIONS, *bindings, "--gin.TARGET_CONFIG=@T5Config()", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"]["target_config"]["emb_dim"] == 64
