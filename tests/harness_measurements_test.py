import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specdec_jax import verification
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.generation import Batch, Pair
from specdec_jax.harness import acceptance, costs, records, simulated, walltime
from specdec_jax.harness.costs import Costs, Workload
from specdec_jax.harness.simulated import SimulatedAcceptance
from specdec_jax.harness.walltime import Paired
from specdec_jax.models.t5_config import T5Config
from specdec_jax.sampling import make_sampling
from specdec_jax.types import Inputs
from specdec_jax.vocabularies import load_vocabulary


def workload(gamma=2, max_length=12, rule=verification.block, temperature=0.0, batch=2) -> Workload:
    target, draft = tiny.model(), tiny.model(emb=12)
    sampling = make_sampling(batch, temperature=temperature)
    return Workload(
        target=target,
        target_params=tiny.params(target),
        drafter=ModelDrafter(draft),
        draft_params=tiny.params(draft, seed=1),
        inputs=Inputs(tiny.encoder_inputs(batch)),
        sampling=sampling,
        draft_sampling=sampling,
        seeds=jnp.arange(batch, dtype=jnp.int32),
        gamma=gamma,
        max_length=max_length,
        rule=rule,
    )


SECONDS = {
    "target_one": [2.0, 4.0, 2.0],
    "target_block": [3.0, 6.0, 3.0],
    "draft_one": [0.2, 0.4, 0.1],
    "draft_two": [0.4, 0.8, 0.4],
    "bodies": [4.0, 8.0, 4.0],
    "step": [5.0, 10.0, 5.0],
    "plain_step": [2.5, 5.0, 2.5],
    "prefill_target": [6.0, 6.0, 6.0],
    "prefill_draft": [1.0, 1.0, 1.0],
}


def test_costs_are_ratios_within_a_round():
    found = Costs(gamma=3, **SECONDS)
    assert found.c == pytest.approx(0.1) and found.verification == pytest.approx(1.5)
    assert found.calls_alone == pytest.approx([3.8, 7.6, 3.6])
    assert found.efficiency_alone == pytest.approx(3.8 / 5) and found.loop_efficiency == pytest.approx(0.8)
    assert found.interplay == pytest.approx(0.95) and found.plain_efficiency == pytest.approx(0.8)
    assert found.overhead == pytest.approx(1.0)


def test_everything_is_measured_with_the_shapes_of_decoding(monkeypatch):
    seen = []
    extend = tiny.model().__class__.extend

    def noted(self, params, cache, tokens, positions):
        seen.append((self.config.emb_dim, tokens.shape[1], cache.keys[0].shape[2]))
        return extend(self, params, cache, tokens, positions)

    monkeypatch.setattr(costs, "_SECONDS_PER_LOOP", 0.002)
    monkeypatch.setattr(type(tiny.model()), "extend", noted)
    jax.clear_caches()
    found = costs.measure(workload(gamma=2, max_length=12), rounds=2)
    assert all(len(values) == 2 and min(values) > 0 for name, values in found._asdict().items() if name != "gamma")
    # target and draft, one token, a block, the draft's first call: caches of 12 + gamma + 1 slots, 13 in plain decoding
    assert set(seen) >= {(8, 1, 15), (8, 3, 15), (12, 1, 15), (12, 2, 15), (8, 1, 13)}
    with pytest.raises(ValueError, match="max_length is 7; to time steps of up to 3 tokens it must be 12 or more"):
        costs.measure(workload(gamma=2, max_length=7), rounds=1)


def test_the_timed_loop_makes_the_calls_it_says():
    work = workload()
    static = dict(target=work.target, drafter=work.drafter, first=True, ones=2, block=3, capacity=work.capacity)
    static["at_once"] = 0
    arrays = dict(target_params=work.target_params, draft_params=work.draft_params, inputs=work.inputs)
    arrays |= dict(sampling=work.draft_sampling, seeds=work.seeds)
    text = str(jax.make_jaxpr(lambda num: costs._loop(**static, **arrays, num=num))(3))
    assert text.count("optimization_barrier") == 3  # the first draft call, the others in a scan, and the target call
    a, b = costs._loop(**static, **arrays, num=1), costs._loop(**static, **arrays, num=5)
    assert a.shape == (2, work.capacity + 1)
    np.testing.assert_array_equal(a, b)  # nothing is emitted, so that every iteration is the same work


def test_seconds_per_iteration_come_from_the_difference():
    slope = costs._Slope(lambda: None, lambda: None, lambda value: value)
    few, many = costs.Timed(4, 1.0, (1.0, 1.0, 9.0)), costs.Timed(14, 3.0, (3.0, 2.0, 3.0))
    assert slope.per_iteration(few, many) == pytest.approx([0.2, 0.1, 3 / 14])  # the last one was disturbed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alpha_is_the_mean_of_the_sum_of_min_p_q(temperature):
    work = workload(temperature=temperature)
    result = jax.device_get(work.run(limit=12, gamma=0, eos_ids=(1,)))
    target, draft = work.target, work.drafter.model
    batch = Batch(work.inputs, work.seeds, work.sampling, work.draft_sampling, 2)
    pair = Pair(target, work.target_params, work.drafter, work.draft_params, load_vocabulary("bytes"))
    found = acceptance.measure(pair, [batch], [result], [1.0, 0.5], num_inputs=2)

    shifted = np.pad(result.tokens, ((0, 0), (1, 0)))[:, :-1]
    laws = []
    for model, params in ((target, work.target_params), (draft, work.draft_params)):
        logits = np.asarray(model.forward(params, work.inputs.encoder_tokens, jnp.asarray(shifted)), np.float64)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        laws.append(weights / weights.sum(-1, keepdims=True))
    p, q = laws
    if temperature == 0:
        best_q = q.argmax(-1)
        likely = np.take_along_axis(p, best_q[..., None], axis=-1)[..., 0] >= 0.5 * p.max(-1)
        beta, lenient = (p.argmax(-1) == best_q).astype(float), likely.astype(float)
    else:
        beta, lenient = np.minimum(p, q).sum(-1), np.minimum(p / 0.5, q).sum(-1)
    inside = np.arange(12)[None] < result.lengths[:, None]
    assert found.num_tokens == inside.sum() == result.lengths.sum() and found.num_outputs == 2
    assert found.alpha == pytest.approx(beta[inside].mean(), abs=1e-5)
    assert found.lenience == pytest.approx({"1.0": found.alpha, "0.5": lenient[inside].mean()}, abs=1e-5)
    assert sum(found.histogram) == pytest.approx(1)
    total = sum(some.alpha * some.num_tokens for some in found.by_position)
    assert total == pytest.approx(found.alpha * found.num_tokens) and found.by_position[0].last == 1
    with pytest.raises(ValueError, match="emitted no token"):
        acceptance.measure(pair, [batch], [result._replace(lengths=np.zeros_like(result.lengths))], [], num_inputs=2)


def test_the_standard_error_is_of_outputs_not_of_tokens():
    rng = np.random.default_rng(0)
    level = rng.random((400, 1))  # all tokens of an output alike: 400 independent numbers, not 4000
    beta, inside = np.broadcast_to(level, (400, 10)), np.ones((400, 10), bool)
    mean, error = acceptance.mean_and_error(beta, inside, num_inputs=400)
    assert mean == pytest.approx(level.mean()) and error == pytest.approx(level.std(ddof=1) / 20, rel=1e-6)
    thrice = acceptance.mean_and_error(np.tile(beta, (3, 1)), np.tile(inside, (3, 1)), num_inputs=400)
    assert thrice == pytest.approx((mean, error))  # inputs that come again tell nothing new
    assert acceptance.mean_and_error(beta, inside, num_inputs=1) == (pytest.approx(mean), None)


def paired(plain, spec, tokens=10, steps=4, equal=True):
    return Paired(list(plain), list(spec), tokens, tokens, steps, steps, 6, 8, equal, [])


def test_speedup_is_of_neighbouring_times_and_a_geometric_mean():
    assert paired([2.0, 4.0, 2.0], [1.0, 2.0, 4.0]).speedup == 2.0
    found = walltime.geometric_mean([1.0, 4.0, 2.0])
    assert found.mean == pytest.approx(2.0) and 1 <= found.low < 2 < found.high <= 4
    assert walltime.geometric_mean([2.0]) == (2.0, None, None)
    with pytest.raises(ValueError, match="all above 0"):
        walltime.geometric_mean([1.0, 0.0])


def test_prediction_from_tokens_has_the_encoders_on_their_sides():
    found = walltime.predict_from_tokens([paired([1], [1], tokens=10, steps=4)], Costs(gamma=3, **SECONDS))
    assert found == pytest.approx((6 + 10 * 2) / (6 + 1 + 4 * 4))


def test_walltime_decodes_the_same_tokens_both_ways_in_alternating_order(monkeypatch):
    orders = []
    real = walltime.interleaved

    def noted(functions, repeats):
        orders.append([function.__name__ for function in functions])
        return real(functions, repeats=repeats)

    monkeypatch.setattr(walltime, "interleaved", noted)
    pairs = walltime.measure(
        [workload(), workload()], eos_ids=(1,), repeats=2, margins=lambda *_: pytest.fail("they differ")
    )
    assert orders == [["plain", "speculative"], ["speculative", "plain"]]
    assert all(pair.equal and len(pair.seconds) == len(pair.plain_seconds) == 2 for pair in pairs)
    assert all(pair.longest <= pair.tokens <= 24 and pair.steps <= pair.longest for pair in pairs)
    sampled = walltime.measure([workload(temperature=1.0)], eos_ids=(1,), repeats=1, margins=None)
    assert sampled[0].equal is None


def test_outputs_that_differ_are_told_with_their_margins():
    def careless(keys, target, proposal, lenience):  # lets everything pass
        return proposal.num_guesses, jnp.full_like(proposal.num_guesses, 7)

    work = workload(rule=careless)
    found = walltime.measure([work], eos_ids=(1,), repeats=1, margins=lambda work, plain, tokens: [0.25])
    assert found[0].equal is False and found[0].margins == [0.25]


@pytest.mark.parametrize("rule", [verification.token, verification.coupled])
def test_plain_decoding_draws_as_the_rule_that_says_the_same(rule):
    work = workload(temperature=1.0, rule=rule)
    plain, speculative = (np.asarray(work.run(limit=12, gamma=gamma).tokens) for gamma in (0, None))
    assert np.array_equal(plain, speculative) == (rule is verification.coupled)


@pytest.mark.parametrize("rule", [verification.token, verification.block])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_simulated_acceptance_has_its_alpha(rule, temperature):
    work = workload(gamma=3, max_length=400, rule=SimulatedAcceptance(rule, 0.6), temperature=temperature)
    result = jax.device_get(work.run(limit=400))
    assert (result.lengths == 400).all()
    share = result.accepted.sum() / result.trials.sum()
    assert share == pytest.approx(0.6, abs=4 * math.sqrt(0.24 / result.trials.sum()))
    with pytest.raises(ValueError, match=r"alpha is 1.5"):
        SimulatedAcceptance(rule, 1.5)


def test_simulated_acceptance_does_the_rule_s_work():
    def flops(rule):
        work = workload(rule=rule, temperature=1.0)
        lowered = jax.jit(lambda: work.run(limit=12)).lower()
        return lowered.compile().cost_analysis()["flops"]

    assert flops(SimulatedAcceptance(verification.block, 0.6)) >= flops(verification.block)


def test_random_models_have_their_sizes_and_finite_logits():
    config = T5Config(
        vocab_size=40, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, num_encoder_layers=2, num_decoder_layers=3
    )
    model, params = simulated.random_model(config, seed=0)
    inputs = simulated.random_inputs(2, 7, 40, seed=0)
    assert inputs.shape == (2, 7) and int(inputs.min()) >= 2
    assert bool(jnp.isfinite(model.forward(params, inputs, inputs)).all())


def test_records_resume_and_are_never_half_written(tmp_path, monkeypatch):
    path = tmp_path / "results" / "table2_x.json"
    open_ = dict(name="x", simulated=False, settings={"gammas": (1, 2)})
    record = records.Record.open(path, **open_)
    assert not path.exists()
    record.add("cells", {"task": "a", "gamma": 1, "speedup": 1.5})
    before = path.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="disk full"):
        patched.setattr(records.os, "replace", fail)
        record.add("cells", {"task": "a", "gamma": 2})
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [path.name]
    again = records.Record.open(path, **open_)
    assert again.find("cells", task="a", gamma=1)["speedup"] == 1.5 and again.find("cells", task="a", gamma=2) is None
    (environment,) = again.document["environments"]
    assert environment["versions"]["jax"] == jax.__version__ and environment["cores"] >= 1
    with pytest.raises(ValueError, match=r"measured with settings.gammas \[1, 2\], which is now \[1, 3\]"):
        records.Record.open(path, name="x", simulated=False, settings={"gammas": (1, 3)})
    path.write_text(json.dumps({"cells": []}))
    with pytest.raises(ValueError, match="holds no measurements of this program"):
        records.Record.open(path, **open_)
    path.write_bytes(before[:40])
    with pytest.raises(ValueError, match="holds no measurements of this program"):
        records.Record.open(pathlib.Path(path), **open_)
