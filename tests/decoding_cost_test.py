"""What a step costs: one compilation, no host round trip, gamma draft calls and one target call."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from tiny_pair import TARGET, Wrapped, inputs, plain, speculative, target_params

from specdec_jax import decoding, verification
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.sampling import make_sampling


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


def arguments(gamma, temperature):
    """What `decode` takes besides models and inputs, for two rows."""
    sampling = make_sampling(2, temperature=temperature)
    return {
        "gamma": gamma,
        "max_length": 10,
        "sampling": sampling,
        "draft_sampling": sampling,
        "seeds": jnp.arange(2, dtype=jnp.int32),
        "eos_ids": jnp.asarray([1], jnp.int32),
        "rule": verification.token,
        "lenience": 1.0,
    }


@pytest.mark.parametrize("gamma", [1, 4])
def test_a_step_is_gamma_draft_calls_and_one_target_call(gamma):
    @dataclasses.dataclass(frozen=True)
    class Marked(Wrapped):
        name: str

        def extend(self, params, cache, tokens, positions):
            def call(params, cache, tokens, positions):
                return self.inner.extend(params, cache, tokens, positions)

            call.__name__ = self.name
            return jax.jit(call)(params, cache, tokens, positions)

    def run(params, x):
        drafter = ModelDrafter(Marked(TARGET, "draft_call"))
        return decoding.decode(Marked(TARGET, "target_call"), params, drafter, params, x, **arguments(gamma, 1.0))

    (body,) = while_bodies(jax.make_jaxpr(run)(target_params(), inputs(2)).jaxpr)
    assert count_calls(body, "target_call") == 1
    assert count_calls(body, "draft_call") == gamma


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_host_round_trip(temperature):
    models = (TARGET, target_params(), ModelDrafter(TARGET), target_params())
    text = decoding.decode.lower(*models, inputs(2), **arguments(3, temperature)).as_text()
    for word in ("callback", "infeed", "outfeed", "send", "recv"):
        assert word not in text


@pytest.mark.parametrize("gamma", [0, 3])
def test_no_cache_is_copied_in_the_loop(gamma):
    x, drafter = inputs(2), ModelDrafter(TARGET) if gamma else None
    models = (TARGET, TARGET.prepare(target_params()), drafter, TARGET.prepare(target_params()) if gamma else None)
    text = decoding.decode.lower(*models, x, **arguments(gamma, 0.0)).compile().as_text()
    config, capacity = TARGET.config, 10 + gamma + 1
    cache = rf"= f32\[2,{config.num_heads},{capacity},{config.head_dim}\]\S* "
    assert re.search(cache + r"(fusion|dynamic-update-slice)\(", text)  # caches are found by this shape
    loops = re.sub(r"(?ms)^ENTRY .*?^}", "", text)  # before the loop each cache becomes a buffer of its own
    assert not re.findall(cache + r"copy\(", loops)
