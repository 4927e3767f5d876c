"""Drafters that are no models: what they guess, that their q is a law, and that guesses change no output."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny_pair import TARGET, VOCAB, consistent, inputs, plain, same_tokens, speculative, target_params

from specdec_jax import verification
from specdec_jax.adaptation import make_adaptation
from specdec_jax.drafters import named
from specdec_jax.drafters.copying import CopyDrafter
from specdec_jax.drafters.hierarchical import HierarchicalDrafter
from specdec_jax.drafters.mixture import MixtureDrafter
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.ngram import BigramDrafter, UnigramDrafter, successors
from specdec_jax.drafters.one_shot import OneShotDrafter
from specdec_jax.drafters.random_tokens import RandomDrafter
from specdec_jax.drafters.table import Table, count
from specdec_jax.sampling import PointMass, StepKeys, make_sampling, row_keys
from specdec_jax.types import Inputs

SEQUENCES = [[5, 7, 7, 9, 1], [5, 7, 9, 5, 1], [9, 5, 7, 1]]


@pytest.fixture(scope="module")
def table():
    """Of what the target says to other inputs."""
    result = plain(8, x=inputs(8, seed=3))
    outputs = [row[:n].tolist() for row, n in zip(np.asarray(result.tokens), np.asarray(result.lengths), strict=True)]
    return count(outputs, vocab_size=VOCAB, distances=5, source="a test")


def near():
    return tiny.nudged(target_params(), 0.05)


def drafters(params):
    """name: drafter, its parameters."""
    model = ModelDrafter(TARGET)
    return {
        "unigram": (UnigramDrafter(), params),
        "bigram": (BigramDrafter(), params),
        "copy": (CopyDrafter(), None),
        "copy with a table": (CopyDrafter(shortest=2, longest=3), params),
        "one-shot": (OneShotDrafter(), params),
        "random": (RandomDrafter(VOCAB), None),
        "mixture": (MixtureDrafter(model, BigramDrafter(), 0.6, VOCAB), (near(), params)),
        "hierarchical": (HierarchicalDrafter(TARGET, BigramDrafter(), 2), (near(), params)),
        "hierarchical of models": (HierarchicalDrafter(TARGET, model, 3), (target_params(), near())),
    }


NAMES = list(drafters(None))


def decode(drafter, params, batch, *, gamma=4, **how):
    return speculative(batch, gamma=gamma, drafter=(drafter, params), **how)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_plain_decoding(name, table):
    result = decode(*drafters(table.params())[name], 3)
    same_tokens(result, plain(3))
    consistent(result)


@pytest.mark.parametrize("name", NAMES)
def test_coupled_equals_plain_decoding(name, table):
    result = decode(*drafters(table.params())[name], 3, temperature=1.0, rule=verification.coupled)
    same_tokens(result, plain(3, temperature=1.0, rule=verification.coupled))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("unigram", "hierarchical of models")])
def test_a_row_does_not_depend_on_its_batch(name, table):
    """Above temperature 0, where a wrong number would show."""
    drafter, params = drafters(table.params())[name]
    together = decode(drafter, params, 3, temperature=1.0)
    tokens = inputs(3).encoder_tokens
    alone = decode(drafter, params, 1, temperature=1.0, x=Inputs(tokens[2:]), seeds=jnp.asarray([2], jnp.int32))
    np.testing.assert_array_equal(together.tokens[2], alone.tokens[0])
    np.testing.assert_array_equal(together.step_accepted[2], alone.step_accepted[0])


def test_a_hierarchy_of_the_target_itself_is_always_accepted(table):
    """Its q is the middle model's law at each place: were it a residual's, some guess would be rejected."""
    drafter = HierarchicalDrafter(TARGET, BigramDrafter(), 2)
    for temperature in (0.0, 1.0):
        result = decode(drafter, (target_params(), table.params()), 3, temperature=temperature)
        np.testing.assert_array_equal(result.num_target_calls, -(-np.asarray(result.lengths) // 5))


@dataclasses.dataclass(frozen=True)
class Counted:
    """Guesses a token by its place, and appends to its parameters, a list, whenever a step begins."""

    def init(self, params, inputs, cache_length):
        return None

    def step(self, params, state, tokens, positions, *, first):
        if first:
            jax.debug.callback(params.append, positions)
        return PointMass((positions[:, None] * 7) % VOCAB), state


def test_a_hierarchy_makes_no_more_guesses_than_are_wanted():
    """The inner drafter begins anew for each call of the model, and once more to catch up."""
    drafter, tokens = HierarchicalDrafter(TARGET, Counted(), 1), jnp.zeros((2, 40), jnp.int32)
    positions, sampling = jnp.asarray([3, 5]), make_sampling(2, temperature=1.0)
    keys = StepKeys(row_keys(jnp.arange(2)), positions)
    for wanted, calls in (([4, 4], range(2, 5)), ([1, 1], range(1, 2)), ([1, 0], range(1, 2)), ([0, 0], range(1))):
        begun = []
        params = (target_params(), begun)
        state = drafter.init(params, inputs(2), 40)
        found, _ = drafter.propose(
            params, state, tokens, positions, gamma=4, wanted=jnp.asarray(wanted), sampling=sampling, keys=keys
        )
        np.testing.assert_array_equal(found.num_guesses, wanted)
        jax.effects_barrier()
        assert len(begun) / 2 in calls


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_a_hierarchy_with_adaptive_gamma_does_not_depend_on_its_batch(temperature):
    drafter = HierarchicalDrafter(TARGET, ModelDrafter(TARGET), 2)
    chosen = make_adaptation(4, costs=[1 + 0.4 * i for i in range(5)], alpha=0.6, weight=2.0)
    how = {"temperature": temperature, "adaptation": chosen}
    together = decode(drafter, (near(), target_params()), 3, **how)
    tokens = inputs(3).encoder_tokens
    alone = decode(
        drafter, (near(), target_params()), 1, x=Inputs(tokens[2:]), seeds=jnp.asarray([2], jnp.int32), **how
    )
    np.testing.assert_array_equal(together.tokens[2], alone.tokens[0])
    np.testing.assert_array_equal(together.step_guesses[2], alone.step_guesses[0])
    if not temperature:
        same_tokens(together, plain(3))
    assert 0 < together.drafted.sum() < 4 * together.num_target_calls.sum()


def test_counts():
    table = count(SEQUENCES, vocab_size=12, num_ids=10, distances=2, source="three")
    assert table.counts.tolist() == [0, 3, 0, 0, 0, 4, 0, 4, 0, 3, 0, 0]
    assert table.after(5) == [(7, 3), (1, 1)] and table.after(0) == [(5, 2), (9, 1)]
    assert table.after(5, 2) == [(7, 1), (9, 1), (1, 1)] or sorted(table.after(5, 2)) == [(1, 1), (7, 1), (9, 1)]
    assert table.after(3) == [] and table.distances == 2
    with pytest.raises(ValueError, match="token is 12 and distance 1; the table has tokens 0 to 11"):
        table.after(12)
    assert count(SEQUENCES, vocab_size=12, least=2).after(5) == [(7, 3)]


def test_a_row_is_the_law_that_it_claims_to_be():
    table = count(SEQUENCES, vocab_size=12, num_ids=10, distances=2)
    params = table.params()
    unigram = (np.asarray([0, 3, 0, 0, 0, 4, 0, 4, 0, 3]) + 1) / 24
    np.testing.assert_allclose(params.unigram, [*unigram, 0, 0], rtol=1e-6)
    row = np.asarray(successors(params, jnp.asarray([5, 3, 0]), 1))
    expected = np.asarray([*(2 / 6 * unigram), 0, 0])  # four times, two different ones
    expected[[7, 1]] += [3 / 6, 1 / 6]
    np.testing.assert_allclose(row[0], expected, rtol=1e-6)
    np.testing.assert_allclose(row[1], params.unigram, rtol=1e-6)  # never seen
    np.testing.assert_allclose(row.sum(axis=1), 1, rtol=1e-6)
    assert (row[:, :10] > 0).all() and (row[:, 10:] == 0).all()
    for width in (1, 2, 64):  # what is cut off goes to the unigram
        some = table.params(width)
        for distance in (1, 2):
            law = np.asarray(successors(some, jnp.arange(12), distance))
            np.testing.assert_allclose(law.sum(axis=1), 1, rtol=1e-6)
            np.testing.assert_array_equal(some.best[distance - 1], law.argmax(axis=1))


def test_a_table_is_read_as_it_was_written(tmp_path, table):
    path = tmp_path / "table.npz"
    table.save(path)
    again = Table.load(path)
    for name, value in table._asdict().items():
        np.testing.assert_array_equal(getattr(again, name), value)
    assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"cannot read the table .*table\.npz \(.*; make one with specdec"):
        Table.load(path)
    with pytest.raises(ValueError, match=r"cannot read the table nowhere\.npz"):
        Table.load("nowhere.npz")
    for change in ({"num_ids": 3}, {"distances": 1}, {"times": table.times[1:]}, {"contexts": table.contexts[::-1]}):
        table._replace(**change).save(path)
        with pytest.raises(ValueError, match="cannot read the table"):
            Table.load(path)


@pytest.mark.parametrize(
    ("sequences", "kwargs", "message"),
    [
        ([], {}, "there is no token to count"),
        ([[5, 12]], {}, "ids are 5 to 12, and the vocabulary has 12"),
        ([[5, 10]], {"num_ids": 10}, "ids are 5 to 10, and the vocabulary has 10"),
        ([[5]], {"distances": 0}, "distances and least are 0 and 1"),
    ],
)
def test_what_cannot_be_counted(sequences, kwargs, message):
    with pytest.raises(ValueError, match=message):
        count(sequences, vocab_size=12, **kwargs)


def proposal(drafter, params, source, history, *, gamma=4, temperature=0.0, vocab=30):
    """One row's guesses, behind a start token and this history."""
    tokens = jnp.zeros((1, 40), jnp.int32).at[0, 1 : 1 + len(history)].set(jnp.asarray(history, jnp.int32))
    positions = jnp.asarray([len(history)], jnp.int32)
    state = drafter.init(params, Inputs(jnp.asarray([source], jnp.int32)), 40)
    keys = StepKeys(row_keys(jnp.asarray([0])), positions)
    sampling = make_sampling(1, temperature=temperature, num_ids=vocab)
    wanted = jnp.asarray([gamma])
    found, _ = drafter.propose(
        params, state, tokens, positions, gamma=gamma, wanted=wanted, sampling=sampling, keys=keys
    )
    return found, found.tokens[0, : int(found.num_guesses[0])].tolist()


def test_copying_goes_on_behind_the_longest_match():
    source = [9, 8, 7, 6, 5, 8, 7, 4, 3, 1, 0, 0]
    copied = lambda *history, **kwargs: proposal(CopyDrafter(**kwargs), None, source, history)[1]  # noqa: E731
    assert copied(20, 9, 8, 7) == [6, 5, 8, 7]  # three tokens match, elsewhere two
    assert copied(20, 5, 8, 7) == [4, 3, 1]  # up to the end of the input
    assert copied(20, 8, 7) == [6, 5, 8, 7]  # two places match alike: the one that is as far in as the output
    assert copied(20, 21, 22, 23, 24, 25, 8, 7) == [4, 3, 1]
    assert copied(20, 21) == [] and copied() == []  # nothing matches; nothing is there to match
    assert copied(20, 4, shortest=2) == [] and copied(20, 7, 4, shortest=2) == [3, 1]
    assert copied(15, 16, 17, 15) == [16, 17, 15, 16]  # from the output, where it comes round to itself
    assert copied(15, 8, 16, 15, 8) == [16, 15, 8, 16]  # the output's match of two is longer than the input's of one


def test_copying_falls_back_to_the_likeliest_successors():
    table = count([[5, 7, 9, 1]] * 3, vocab_size=30).params()
    found, guesses = proposal(CopyDrafter(), table, [20, 21, 1], [5])
    assert guesses == [7, 9, 1, int(table.best[0, 1])]
    assert (np.asarray(found.confidence[0, :3]) > 0.5).all()
    assert proposal(CopyDrafter(), table, [20, 5, 22, 1], [5])[1] == [22, 1]


def test_random_guesses_are_of_valid_ids_and_their_law():
    found, guesses = proposal(RandomDrafter(32), None, [1], [5], gamma=30, temperature=1.0)
    assert len(set(guesses)) > 10 and max(guesses) < 30
    np.testing.assert_allclose(found.q[0, 0], [1 / 30] * 30 + [0] * 2, rtol=1e-6)
    assert proposal(RandomDrafter(32), None, [1], [5])[0].q is None


def test_a_mixture_is_of_both_laws(table):
    params = table.params()
    tokens, positions = jnp.asarray([[0, 5, 7]]), jnp.asarray([2])
    both = MixtureDrafter(UnigramDrafter(), BigramDrafter(), 0.3, VOCAB)
    logits, _ = both.step((params, params), (None, None), tokens, positions, first=True)
    expected = 0.3 * params.unigram + 0.7 * successors(params, jnp.asarray([7]), 1)[0]
    np.testing.assert_allclose(jnp.exp(logits[0]), expected, rtol=1e-5)


def test_alpha_of_a_bigram_is_the_sum_of_min_p_q(table):
    """beta at each place that was tested is sum_x min(p, q) there, and so often guesses were accepted."""
    batch, params = 64, table.params()
    x = inputs(batch, seed=11)
    result = jax.device_get(
        decode(BigramDrafter(), params, batch, gamma=1, temperature=1.0, x=x, rule=verification.token)
    )
    prefixes = jnp.pad(jnp.asarray(result.tokens), ((0, 0), (1, 0)))[:, :-1]
    p = jax.nn.softmax(TARGET.forward(target_params(), x.encoder_tokens, prefixes))
    q = successors(params, prefixes.reshape(-1), 1).reshape(p.shape)
    beta = np.asarray(jnp.sum(jnp.minimum(p, q), axis=-1))
    starts = np.cumsum(result.step_emitted, axis=1) - result.step_emitted
    tested = [beta[row, starts[row, i]] for row in range(batch) for i in range(result.num_target_calls[row])]
    trials = result.trials.sum()
    assert trials > 300 and len(tested) - trials < 10  # of a step that a limit cut, no guess counts
    np.testing.assert_allclose(result.beta_sum.sum() / trials, np.mean(tested), atol=0.01)
    error = np.sqrt(np.mean(np.multiply(tested, np.subtract(1, tested))) / trials)
    assert abs(result.accepted.sum() / trials - np.mean(tested)) < 3 * error


def test_one_shot_looks_at_nothing_behind_the_newest_token(table):
    """What earlier steps left there depends on the batch; seen where a rule reads the history."""
    params, drafter = table.params(), OneShotDrafter()
    positions = jnp.asarray([3])
    sampling = make_sampling(1, temperature=1.0, repetition_penalty=2.0, no_repeat_ngram=2)
    keys = StepKeys(row_keys(jnp.asarray([0])), positions)
    laws = []
    for left in ([0, 0, 0], [5, 5, 5]):
        tokens = jnp.asarray([[0, 7, 9, 7, *left, 0, 0]])
        wanted = jnp.asarray([3])
        found, _ = drafter.propose(
            params, None, tokens, positions, gamma=3, wanted=wanted, sampling=sampling, keys=keys
        )
        laws.append(np.asarray(found.q))
    np.testing.assert_array_equal(*laws)


@dataclasses.dataclass(frozen=True)
class BrokenBlock:
    """One-shot guesses, the second of which comes from a law that is NaN."""

    width: int = VOCAB

    def init(self, params, inputs, cache_length):
        return None

    def propose(self, params, state, tokens, positions, *, gamma, wanted, sampling, keys):
        q = jnp.full((len(positions), gamma, self.width), 1 / self.width).at[:, 1].set(jnp.nan)
        guesses = jnp.full((len(positions), gamma), 2, jnp.int32)
        return verification.Proposal(guesses, q, jnp.full(positions.shape, gamma, jnp.int32)), state


def test_what_a_block_drafter_proposes_is_looked_at():
    result = decode(BrokenBlock(), None, 2, temperature=1.0)
    assert (np.asarray(result.step_guesses)[..., 1] < 2).all()  # neither it nor what is behind it counts
    assert np.isfinite(result.beta_sum).all() and (result.drafted == result.num_target_calls).all()
    with pytest.raises(ValueError, match="The draft has a vocabulary of 7 ids and the target one of 20"):
        decode(BrokenBlock(7), None, 2, temperature=1.0)


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="shortest and longest are 3 and 2"):
        CopyDrafter(shortest=3, longest=2)
    with pytest.raises(ValueError, match=r"weight is 1\.5; it must be 0 to 1"):
        MixtureDrafter(UnigramDrafter(), BigramDrafter(), 1.5, VOCAB)
    with pytest.raises(ValueError, match="second is CopyDrafter, which proposes blocks"):
        MixtureDrafter(UnigramDrafter(), CopyDrafter(), 0.5, VOCAB)
    with pytest.raises(ValueError, match="inner is CopyDrafter, which proposes blocks"):
        HierarchicalDrafter(TARGET, CopyDrafter(), 2)
    with pytest.raises(ValueError, match="inner_gamma is 0"):
        HierarchicalDrafter(TARGET, BigramDrafter(), 0)
    one = count(SEQUENCES, vocab_size=VOCAB).params()
    with pytest.raises(ValueError, match="gamma is 4 and the table has distances up to 1; build it with --distances=4"):
        decode(OneShotDrafter(), one, 1)
    with pytest.raises(ValueError, match="drafter is 'trigram'; it must be one of 'model', 'unigram'"):
        named.make("trigram", VOCAB, None, None, None)
    with pytest.raises(ValueError, match="drafter is 'bigram', which needs draft_table"):
        named.make("bigram", VOCAB, None, None, None)
    with pytest.raises(ValueError, match="drafter is 'model', which needs draft_checkpoint"):
        named.make("model", VOCAB, None, None, None)
    for name in named.NAMES:
        made, _ = named.make(name, VOCAB, TARGET, target_params(), one)
        assert dataclasses.is_dataclass(made) and hash(made) is not None
