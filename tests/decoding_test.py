"""Invariants of the loop: greedy equality, one-token-at-a-time equality, limits, counts, independence of rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specdec_jax import decoding, verification
from specdec_jax.decoding import autoregressive_decode, speculative_decode
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.results import FinishReason
from specdec_jax.sampling import PointMass, make_sampling
from specdec_jax.types import Inputs
from specdec_jax.verification import Proposal

VOCAB = 20
TARGET = tiny.model(vocab=VOCAB, emb=16)
DRAFT = tiny.model(vocab=VOCAB)


def target_params(seed=0):
    return tiny.params(TARGET, seed, 3.0)


def inputs(batch, seed=0):
    return Inputs(tiny.encoder_inputs(batch, length=6, vocab=VOCAB, seed=seed))


def plain(batch, *, temperature=0.0, max_length=20, eos_ids=(1,), x=None, seeds=None, **settings):
    return autoregressive_decode(
        TARGET,
        target_params(),
        inputs(batch) if x is None else x,
        max_length=max_length,
        sampling=make_sampling(batch, temperature=temperature, **settings),
        seeds=jnp.arange(batch, dtype=jnp.int32) if seeds is None else seeds,
        eos_ids=eos_ids,
    )


def speculative(
    batch, *, gamma, drafter="near", temperature=0.0, max_length=20, eos_ids=(1,), x=None, seeds=None, **kw
):
    model, tree = {
        "near": (ModelDrafter(TARGET), tiny.nudged(target_params(), 0.05)),
        "same": (ModelDrafter(TARGET), target_params()),
        "other": (ModelDrafter(DRAFT), tiny.params(DRAFT, 5, 3.0)),
        "wrong": (WrongDrafter(TARGET), target_params()),
        "scripted": (ScriptedDrafter(), None),
    }[drafter]
    return speculative_decode(
        TARGET,
        target_params(),
        model,
        tree,
        inputs(batch) if x is None else x,
        gamma=gamma,
        max_length=max_length,
        sampling=make_sampling(batch, temperature=temperature, **kw),
        seeds=jnp.arange(batch, dtype=jnp.int32) if seeds is None else seeds,
        eos_ids=eos_ids,
    )


@dataclasses.dataclass(frozen=True)
class WrongDrafter(ModelDrafter):
    """Always guesses what the target would not say."""

    def step(self, params, state, tokens, positions, *, first):
        logits, state = super().step(params, state, tokens, positions, first=first)
        return -logits, state


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
    """Proposes 0, 1, .. gamma guesses in turn, by position and row; made-up ids, point masses."""

    def init(self, params, inputs, cache_length):
        return jnp.int32(0)

    def propose(self, params, state, tokens, positions, *, gamma, sampling, keys):
        batch = tokens.shape[0]
        newest = jnp.take_along_axis(tokens, positions[:, None], axis=1)
        guesses = (newest * 7 + positions[:, None] + jnp.arange(gamma)[None]) % VOCAB
        num_guesses = (positions + jnp.arange(batch)) % (gamma + 1)
        return Proposal(guesses.astype(jnp.int32), None, num_guesses.astype(jnp.int32)), state + 1


def same_tokens(a, b):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.lengths, b.lengths)
    np.testing.assert_array_equal(a.finish_reason, b.finish_reason)
    np.testing.assert_allclose(a.scores, b.scores, atol=2e-5)


def consistent(result):
    """What holds for every result."""
    r = jax.tree.map(np.asarray, result)
    np.testing.assert_array_equal(r.accepted + r.extra, r.lengths)
    np.testing.assert_array_equal(r.accept_counts.sum(1), r.num_target_calls)
    np.testing.assert_array_equal((r.accept_counts * np.arange(r.accept_counts.shape[1])[None]).sum(1), r.accepted)
    np.testing.assert_array_equal(r.step_emitted.sum(1), r.lengths)
    np.testing.assert_array_equal((r.step_accepted >= 0).sum(1), r.num_target_calls)
    assert (r.accepted <= r.trials).all() and (r.trials <= r.drafted).all()
    assert (0 <= r.beta_sum).all() and (r.beta_sum <= r.trials + 1e-3).all()
    max_length = r.tokens.shape[1]
    after = np.arange(max_length)[None] >= r.lengths[:, None]
    assert (r.tokens[after] == 0).all() and (r.scores[after] == 0).all() and (r.lengths <= max_length).all()


@pytest.mark.parametrize(
    ("gamma", "batch", "drafter"),
    [
        (1, 1, "near"),
        (2, 3, "other"),
        (3, 5, "near"),
        (4, 1, "wrong"),
        (5, 2, "scripted"),
        (7, 4, "same"),
        (10, 3, "near"),
    ],
)
def test_greedy_equals_plain_decoding(gamma, batch, drafter):
    result = speculative(batch, gamma=gamma, drafter=drafter)
    same_tokens(result, plain(batch))
    consistent(result)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["near", "other", "wrong", "scripted", "same"])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("gamma", range(1, 11))
def test_greedy_equals_plain_decoding_on_the_whole_grid(gamma, batch, drafter):
    same_tokens(speculative(batch, gamma=gamma, drafter=drafter), plain(batch))


def test_plain_greedy_is_the_argmax_of_teacher_forcing():
    batch = 4
    result = plain(batch)
    decoder = jnp.pad(result.tokens, ((0, 0), (1, 0)))[:, :-1]
    logits = TARGET.forward(target_params(), inputs(batch).encoder_tokens, decoder)
    inside = np.arange(20)[None] < np.asarray(result.lengths)[:, None]
    np.testing.assert_array_equal(np.argmax(logits, -1)[inside], np.asarray(result.tokens)[inside])
    log_probs = jax.nn.log_softmax(logits)
    expected = jnp.take_along_axis(log_probs, result.tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(np.asarray(result.scores)[inside], np.asarray(expected)[inside], atol=1e-5)
    assert len(np.unique(result.tokens)) > 4  # or the test would show little


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("gamma", [1, 5])
def test_a_draft_equal_to_the_target_is_always_accepted(gamma, temperature):
    kw = {} if temperature == 0 else {"top_k": 9, "top_p": 0.95}
    result = speculative(3, gamma=gamma, drafter="same", temperature=temperature, eos_ids=(), **kw)
    assert result.num_target_calls.tolist() == [-(-20 // (gamma + 1))] * 3
    np.testing.assert_allclose(result.alpha, 1, atol=1e-5)
    consistent(result)


def test_padded_encoder_rows_do_not_hurt_acceptance():
    x = Inputs(jnp.pad(inputs(3).encoder_tokens, ((0, 0), (0, 7))))
    result = speculative(3, gamma=4, drafter="same", eos_ids=(), x=x)
    assert result.num_target_calls.tolist() == [4] * 3
    np.testing.assert_array_equal(result.tokens, plain(3, eos_ids=()).tokens)


@pytest.mark.parametrize("place", range(6))
def test_eos_at_every_place_of_a_block(place):
    free = plain(1, eos_ids=(), max_length=12)
    tokens = np.asarray(free.tokens)[0]
    eos = int(tokens[place])
    first = int(np.argmax(tokens == eos))
    result = speculative(1, gamma=5, drafter="same", eos_ids=(eos,), max_length=12)
    assert int(result.lengths[0]) == first + 1
    np.testing.assert_array_equal(result.tokens[0, : first + 1], tokens[: first + 1])
    assert int(result.finish_reason[0]) == FinishReason.EOS
    consistent(result)
    same_tokens(result, plain(1, eos_ids=(eos,), max_length=12))


def test_several_eos_ids():
    free = np.asarray(plain(1, eos_ids=()).tokens)[0]
    ids = (int(free[7]), int(free[4]))
    expected = 1 + min(int(np.argmax(free == i)) for i in ids)
    assert int(speculative(1, gamma=3, eos_ids=ids).lengths[0]) == expected


@pytest.mark.parametrize(
    ("max_length", "drafter"),
    [(1, "same"), (2, "same"), (4, "same"), (5, "same"), (6, "same"), (1, "wrong"), (5, "wrong")],
)
def test_never_longer_than_max_length(max_length, drafter):
    gamma = 4  # max_length 1, 2, gamma, gamma + 1, gamma + 2
    result = speculative(2, gamma=gamma, drafter=drafter, max_length=max_length, eos_ids=())
    assert result.tokens.shape == (2, max_length)
    same_tokens(result, plain(2, max_length=max_length, eos_ids=()))
    assert result.finish_reason.tolist() == [FinishReason.LENGTH] * 2
    consistent(result)


def test_eos_just_before_the_limit_is_the_reason():
    free = np.asarray(plain(1, eos_ids=(), max_length=12).tokens)[0]
    fresh = next(i for i in range(3, 12) if free[i] not in free[:i])
    result = speculative(1, gamma=5, drafter="same", eos_ids=(int(free[fresh]),), max_length=fresh + 2)
    assert int(result.finish_reason[0]) == FinishReason.EOS and int(result.lengths[0]) == fresh + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_alone_equals_the_row_in_a_batch(temperature):
    batch = 5
    x = inputs(batch).encoder_tokens
    together = speculative(batch, gamma=3, temperature=temperature)
    order = jnp.asarray([3, 1, 4, 0, 2])
    shuffled = speculative(batch, gamma=3, temperature=temperature, x=Inputs(x[order]), seeds=order.astype(jnp.int32))
    for place, row in enumerate(order.tolist()):
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(shuffled), strict=True):
            np.testing.assert_allclose(np.asarray(a)[row], np.asarray(b)[place], atol=2e-5)
    for row in range(batch):
        seeds = jnp.asarray([row], jnp.int32)
        alone = speculative(1, gamma=3, temperature=temperature, x=Inputs(x[row : row + 1]), seeds=seeds)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        steps = int(alone.num_target_calls[0])
        assert steps == int(together.num_target_calls[row])
        np.testing.assert_array_equal(alone.step_accepted[0], together.step_accepted[row])


def test_padding_the_encoder_input_changes_nothing():
    x = inputs(3).encoder_tokens
    wide = Inputs(jnp.pad(x, ((0, 0), (0, 9))))
    for temperature in (0.0, 1.0):
        a = speculative(3, gamma=3, temperature=temperature)
        np.testing.assert_array_equal(a.tokens, speculative(3, gamma=3, temperature=temperature, x=wide).tokens)


def test_seeds_matter_and_repeat():
    def run(seed, **kw):
        return np.asarray(speculative(2, gamma=3, temperature=1.0, seeds=jnp.asarray([seed, seed + 1]), **kw).tokens)

    np.testing.assert_array_equal(run(4), run(4))
    assert (run(4) != run(40)).any()
    same_input = Inputs(jnp.tile(inputs(1).encoder_tokens, (2, 1)))
    both = run(4, x=same_input)
    assert (both[0] != both[1]).any()


def test_greedy_ignores_seeds():
    a = speculative(2, gamma=3, seeds=jnp.asarray([1, 2]))
    np.testing.assert_array_equal(a.tokens, speculative(2, gamma=3, seeds=jnp.asarray([8, 9])).tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_start_token_other_than_padding(temperature):
    target = tiny.model(vocab=VOCAB, emb=16, start_id=7)
    args = {
        "max_length": 12,
        "sampling": make_sampling(2, temperature=temperature),
        "seeds": jnp.arange(2),
        "eos_ids": (),
    }
    result = speculative_decode(
        target, target_params(), ModelDrafter(target), target_params(), inputs(2), gamma=3, **args
    )
    assert result.num_target_calls.tolist() == [3, 3]
    if temperature == 0:
        same_tokens(result, autoregressive_decode(target, target_params(), inputs(2), **args))
        assert (np.asarray(result.tokens) != np.asarray(plain(2, max_length=12, eos_ids=()).tokens)).any()


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_a_prefix_is_gone_on_from(gamma):
    free = plain(2, max_length=12, eos_ids=())
    prefix = jnp.asarray([[*free.tokens[0, :3]], [free.tokens[1, 0], 0, 0]])  # ragged: 3 tokens and 1
    x = inputs(2)._replace(prefix=prefix)
    if gamma:
        result = speculative(2, gamma=gamma, x=x, max_length=8, eos_ids=())
    else:
        result = plain(2, x=x, max_length=8, eos_ids=())
    np.testing.assert_array_equal(result.tokens[0], free.tokens[0, 3:11])
    np.testing.assert_array_equal(result.tokens[1], free.tokens[1, 1:9])


@dataclasses.dataclass(frozen=True)
class NaNModel:
    """A target whose logits are NaN from a position on, in the row whose input starts with 13."""

    inner: object
    position: int

    @property
    def vocab_size(self):
        return self.inner.vocab_size

    def prefill(self, params, inputs, cache_length):
        cache, prompt, positions = self.inner.prefill(params, inputs, cache_length)
        return (cache, inputs.encoder_tokens[:, 0] == 13), prompt, positions

    def extend(self, params, cache, tokens, positions):
        cache, bad = cache
        logits, cache = self.inner.extend(params, cache, tokens, positions)
        late = positions[:, None] + jnp.arange(tokens.shape[1])[None] >= self.position
        return jnp.where((bad[:, None] & late)[..., None], jnp.nan, logits), (cache, bad)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("where", ["target", "draft"])
def test_nan_logits_end_the_row_or_only_its_guesses(where, temperature):
    x = Inputs(jnp.asarray([[13, 2, 3], [4, 5, 6]]))
    broken = NaNModel(TARGET, 5)
    args = {
        "max_length": 12,
        "sampling": make_sampling(2, temperature=temperature),
        "seeds": jnp.arange(2),
        "eos_ids": (),
    }

    def run(target, draft):
        return speculative_decode(target, target_params(), ModelDrafter(draft), target_params(), x, gamma=3, **args)

    good = run(TARGET, TARGET)
    result = run(broken, TARGET) if where == "target" else run(TARGET, broken)
    np.testing.assert_array_equal(result.tokens[1], good.tokens[1])  # the other row does not notice
    assert int(result.finish_reason[1]) == FinishReason.LENGTH
    if where == "target":
        assert int(result.finish_reason[0]) == FinishReason.NAN and int(result.lengths[0]) == 5
        np.testing.assert_array_equal(result.tokens[0, :5], good.tokens[0, :5])
    else:
        assert int(result.finish_reason[0]) == FinishReason.LENGTH and int(result.lengths[0]) == 12
        assert ((np.asarray(result.tokens) >= 0) & (np.asarray(result.tokens) < VOCAB)).all()
    consistent(result)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("amount", [1e4, -1e4])
def test_what_lies_behind_the_position_is_never_read(amount, temperature):
    """Poison in the slots of rejected guesses changes nothing."""

    @dataclasses.dataclass(frozen=True)
    class Poisoned:
        inner: object

        @property
        def vocab_size(self):
            return self.inner.vocab_size

        def prefill(self, params, inputs, cache_length):
            return self.inner.prefill(params, inputs, cache_length)

        def extend(self, params, cache, tokens, positions):
            def spoil(slots):
                stale = jnp.arange(slots.shape[2])[None] >= positions[:, None]
                return jnp.where(stale[:, None, :, None], amount, slots)

            cache = cache._replace(keys=tuple(map(spoil, cache.keys)), values=tuple(map(spoil, cache.values)))
            return self.inner.extend(params, cache, tokens, positions)

    args = {"max_length": 14, "sampling": make_sampling(3, temperature=temperature), "seeds": jnp.arange(3)}
    tree = tiny.nudged(target_params(), 0.05)
    target, drafter = Poisoned(TARGET), ModelDrafter(Poisoned(TARGET))
    result = speculative_decode(target, target_params(), drafter, tree, inputs(3), gamma=3, **args)
    clean = speculative(3, gamma=3, max_length=14, temperature=temperature)
    np.testing.assert_array_equal(result.tokens, clean.tokens)
    np.testing.assert_array_equal(result.step_accepted, clean.step_accepted)


def test_rows_that_accept_nothing_and_everything_side_by_side():
    @dataclasses.dataclass(frozen=True)
    class Half(ModelDrafter):
        def step(self, params, state, tokens, positions, *, first):
            logits, state = super().step(params, state, tokens, positions, first=first)
            sign = jnp.where(jnp.arange(tokens.shape[0]) % 2 == 0, 1.0, -1.0)
            return logits * sign[:, None], state

    args = {"max_length": 15, "sampling": make_sampling(4, temperature=0.0), "seeds": jnp.arange(4), "eos_ids": ()}
    result = speculative_decode(TARGET, target_params(), Half(TARGET), target_params(), inputs(4), gamma=4, **args)
    assert result.num_target_calls.tolist() == [3, 15, 3, 15]
    same_tokens(result, plain(4, max_length=15, eos_ids=()))
    consistent(result)


def test_a_wrong_first_guess_rejects_the_block():
    result = speculative(2, gamma=4, drafter="wrong", eos_ids=())
    assert result.accepted.tolist() == [0, 0] and result.num_target_calls.tolist() == [20, 20]
    assert result.alpha.tolist() == [0, 0]


def test_rates_are_defined_when_nothing_was_drafted():
    result = plain(2)
    assert result.drafted.tolist() == [0, 0] and result.alpha.tolist() == [0, 0]
    assert result.step_guesses.shape == (2, 20, 0)
    consistent(result)


def test_greedy_drafts_for_a_sampling_target_and_the_reverse_run():
    for target_t, draft_t in [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)]:
        result = speculative_decode(
            TARGET,
            target_params(),
            ModelDrafter(TARGET),
            target_params(),
            inputs(2),
            gamma=3,
            max_length=10,
            sampling=make_sampling(2, temperature=target_t),
            draft_sampling=make_sampling(2, temperature=draft_t),
            seeds=jnp.arange(2),
        )
        consistent(result)
        if target_t == 0:
            same_tokens(result, plain(2, max_length=10))


def test_top_k_1_at_temperature_1_is_argmax():
    same = speculative(3, gamma=3, temperature=1.0, top_k=1)
    np.testing.assert_array_equal(same.tokens, speculative(3, gamma=3).tokens)


@pytest.mark.parametrize("gamma", [0, 4])
def test_one_compilation_per_shape(gamma):
    before = decoding.decode._cache_size()
    for seed, temperature in [(0, 1.0), (5, 0.7), (6, 0.9)]:
        seeds = jnp.asarray([seed, seed + 1], jnp.int32)
        kw = {"temperature": temperature, "top_k": 4 + seed, "seeds": seeds, "max_length": 9}
        x = inputs(2, seed=seed)
        plain(2, x=x, **kw) if gamma == 0 else speculative(2, gamma=gamma, x=x, **kw)
    assert decoding.decode._cache_size() == before + 1


def while_bodies(jaxpr):
    """Every while loop's body that is not inside another while loop."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "while":
            yield eqn.params["body_jaxpr"].jaxpr
        else:
            for param in eqn.params.values():
                if hasattr(param, "jaxpr"):
                    yield from while_bodies(param.jaxpr)


def count_calls(jaxpr, marker, times=1):
    """How often the marked call runs, scans multiplied out."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pjit" or eqn.primitive.name == "jit":
            if eqn.params["name"] == marker:
                total += times
                continue
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for param in eqn.params.values():
            if hasattr(param, "jaxpr"):
                total += count_calls(param.jaxpr, marker, inner)
    return total


@pytest.mark.parametrize("gamma", [1, 4])
def test_a_step_is_gamma_draft_calls_and_one_target_call(gamma):
    @dataclasses.dataclass(frozen=True)
    class Marked:
        inner: object
        name: str

        @property
        def vocab_size(self):
            return self.inner.vocab_size

        def prefill(self, params, inputs, cache_length):
            return self.inner.prefill(params, inputs, cache_length)

        def extend(self, params, cache, tokens, positions):
            def call(params, cache, tokens, positions):
                return self.inner.extend(params, cache, tokens, positions)

            call.__name__ = self.name
            return jax.jit(call)(params, cache, tokens, positions)

    sampling = make_sampling(2, temperature=1.0)

    def run(params, x):
        return decoding.decode(
            Marked(TARGET, "target_call"),
            params,
            ModelDrafter(Marked(TARGET, "draft_call")),
            params,
            x,
            gamma=gamma,
            max_length=10,
            sampling=sampling,
            draft_sampling=sampling,
            seeds=jnp.arange(2, dtype=jnp.int32),
            eos_ids=jnp.asarray([1], jnp.int32),
            rule=verification.token,
            lenience=1.0,
        )

    (body,) = while_bodies(jax.make_jaxpr(run)(target_params(), inputs(2)).jaxpr)
    assert count_calls(body, "target_call") == 1
    assert count_calls(body, "draft_call") == gamma


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_host_round_trip(temperature):
    sampling = make_sampling(2, temperature=temperature)
    text = decoding.decode.lower(
        TARGET,
        target_params(),
        ModelDrafter(TARGET),
        target_params(),
        inputs(2),
        gamma=3,
        max_length=10,
        sampling=sampling,
        draft_sampling=sampling,
        seeds=jnp.arange(2, dtype=jnp.int32),
        eos_ids=jnp.asarray([1], jnp.int32),
        rule=verification.token,
        lenience=1.0,
    ).as_text()
    for word in ("callback", "infeed", "outfeed", "send", "recv"):
        assert word not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 0}, "gamma is 0; it must be 1 or more"),
        ({"gamma": 5000}, "gamma is 5000"),
        ({"max_length": 0}, "max_length is 0"),
        ({"eos_ids": (-1,)}, r"eos_ids is \(-1,\)"),
        ({"lenience": 0.0}, "lenience is 0.0"),
        ({"lenience": 2.0}, "lenience is 2.0"),
        ({"seeds": jnp.arange(3, dtype=jnp.int32)}, "seeds has 3 rows and inputs 2"),
    ],
)
def test_arguments_out_of_range(change, message):
    args = {
        "gamma": 2,
        "max_length": 5,
        "sampling": make_sampling(2, temperature=0.0),
        "seeds": jnp.arange(2, dtype=jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        speculative_decode(
            TARGET, target_params(), ModelDrafter(TARGET), target_params(), inputs(2), **{**args, **change}
        )


def test_vocabularies_that_differ_are_refused():
    other = tiny.model(vocab=VOCAB + 1)
    with pytest.raises(ValueError, match="vocabulary of 21 ids and the target one of 20"):
        speculative_decode(
            TARGET,
            target_params(),
            ModelDrafter(other),
            tiny.params(other),
            inputs(2),
            gamma=2,
            max_length=5,
            sampling=make_sampling(2, temperature=0.0),
            seeds=jnp.arange(2, dtype=jnp.int32),
        )


def test_point_mass_type_is_what_a_drafter_may_return():
    @dataclasses.dataclass(frozen=True)
    class Constant:
        def init(self, params, inputs, cache_length):
            return ()

        def step(self, params, state, tokens, positions, *, first):
            return PointMass(jnp.full((tokens.shape[0], 1), 3, jnp.int32)), state

    result = speculative_decode(
        TARGET,
        target_params(),
        Constant(),
        None,
        inputs(3),
        gamma=2,
        max_length=12,
        sampling=make_sampling(3, temperature=0.0),
        seeds=jnp.arange(3, dtype=jnp.int32),
    )
    same_tokens(result, plain(3, max_length=12))
