"""Decodes on meshes of 8 CPU devices and on one of them; run by sharding_test.py, since XLA's flags are a process's.

python sharded_decodes.py CASE ... writes a JSON object on stdout: {case: what was found}.
"""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import mini_pair
import numpy as np
import tiny

from specdec_jax import sharding
from specdec_jax.adaptation import make_adaptation
from specdec_jax.checkpoints import t5x
from specdec_jax.decoding import speculative_decode
from specdec_jax.drafters import named
from specdec_jax.drafters.table import count
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.sampling import make_sampling
from specdec_jax.settings import RULES
from specdec_jax.types import Inputs

BATCH, GAMMA = 8, 3
COSTS = [1, 1.5, 2.1, 2.8]
WORDS = [b"blue", b"west green", b"sun", b"a b c", b"fish", b"river two", b"cat", b"one"]
TEMPERATURES = {"greedy": 0.0, "drawn": 1.0, "mixed": [0.0, 1.0] * (BATCH // 2)}


@functools.cache
def models(name):
    """(target, its weights, draft, its weights, encoder tokens)."""
    if name == "mini":
        weights = [t5x.load_params(path) for path in (mini_pair.TARGET, mini_pair.DRAFT)]
        target, draft = (T5(T5Config.from_params(some)) for some in weights)
        rows = [[byte + 3 for byte in word] + [1] + [0] * (15 - len(word)) for word in WORDS]
        return target, weights[0], draft, weights[1], np.asarray(rows, np.int32)
    sizes = dict(emb_dim=16, num_heads=8, head_dim=4, mlp_dim=16, num_encoder_layers=1, num_decoder_layers=1)
    model = T5(T5Config(vocab_size=32, **sizes, logits_via_embedding=name == "shared"))
    weights = tiny.params(model, sharpness=3.0)
    return model, weights, model, tiny.nudged(weights, 0.05), np.asarray(tiny.encoder_inputs(BATCH, vocab=32))


def compiled(target, draft, rule, kind):
    """`kind` is a drafter by name, or "adaptive": the draft with adaptive gamma."""
    adaptation = make_adaptation(GAMMA, costs=COSTS, alpha=0.6, trust=0.8) if kind == "adaptive" else None
    words = [[*(byte + 3 for byte in word.upper()), 1] for word in WORDS]
    table = count(words, vocab_size=target.vocab_size, distances=GAMMA).params() if kind in named.WITH_TABLE else None

    def decode(params, draft_params, inputs, seeds, sampling):
        drafter, own_params = named.make(
            "model" if kind == "adaptive" else kind, target.vocab_size, draft, draft_params, table
        )
        return speculative_decode(
            target,
            params,
            drafter,
            own_params,
            inputs,
            gamma=GAMMA,
            max_length=20,
            sampling=sampling,
            seeds=seeds,
            rule=rule,
            adaptation=adaptation,
        )

    return jax.jit(decode)


def found(result):
    names = ("tokens", "lengths", "finish_reason", "accept_counts", "num_target_calls", "drafted", "scores", "beta_sum")
    return {name: np.asarray(getattr(result, name)).tolist() for name in names}


@functools.cache
def on_one_device(name, rule, temperatures, kind):
    target, params, draft, draft_params, tokens = models(name)
    args = (target.prepare(params), draft.prepare(draft_params), Inputs(jnp.asarray(tokens)), jnp.arange(BATCH))
    sampling = make_sampling(BATCH, temperature=TEMPERATURES[temperatures])
    return found(compiled(target, draft, RULES[rule], kind)(*args, sampling))


def on_mesh(name, sizes, rule, temperatures, kind):
    target, params, draft, draft_params, tokens = models(name)
    mesh, warnings = sharding.make_mesh(*sizes), []
    target = sharding.split_target(target, mesh)
    draft = sharding.split_draft(draft, mesh, name="small", warn=warnings.append)
    params, draft_params = target.place(params), draft.place(draft_params)
    rows = (
        Inputs(tokens),
        np.arange(BATCH, dtype=np.int32),
        make_sampling(BATCH, temperature=TEMPERATURES[temperatures]),
    )
    rows = sharding.put(rows, sharding.row_axes(rows), mesh)
    program = compiled(target, draft, RULES[rule], kind).lower(params, draft_params, *rows).compile()
    result = program(params, draft_params, *rows)
    cache, _, _ = jax.jit(target.prefill, static_argnums=2)(params, rows[0], 32)
    return {
        **found(sharding.fetch(result)),
        "warnings": warnings,
        "gathered": sorted(set(re.findall(r"= (\w+\[[\d,]*\])\S* all-gather\(", program.as_text()))),
        "caches": sorted({str(x.sharding.spec) for x in (*cache.keys, *cache.cross_values)}),
        "kernels": {
            kernel: str(next(iter(params["decoder"]["layers_0"][part][kernel].values())).sharding.spec)
            for part, kernel in (("mlp", "wi_0"), ("mlp", "wo"), ("self_attention", "out"))
        },
        "draft_kernel": str(draft_params["decoder"]["layers_0"]["mlp"]["wo"]["transposed_kernel"].sharding.spec),
    }


def main():
    told = {}
    for case in sys.argv[1:]:
        name, data, model, rule, temperatures, *kind = case.split("-")
        kind = kind[0] if kind else "model"
        told[case] = {
            "one": on_one_device(name, rule, temperatures, kind),
            "mesh": on_mesh(name, (int(data), int(model)), rule, temperatures, kind),
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
