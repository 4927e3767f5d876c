"""Times t5x's own decoder, the target alone in this package's loop, and speculative decoding, in one process.

python scripts/t5x/time_decoders.py --draft draft_small --task ende --num_examples 12

The three models are run as t5x.infer runs them (the partitioner's jit, one batch a call, batch size 1), in turn on each
of the demonstration pair's examples, compilation left out. Ratios are of times of the same input; medians. Needs t5x.
"""

import argparse
import functools
import json
import statistics

import jax
import numpy as np
import seqio
from flax.core import freeze
from t5x import decoding, models, partitioning  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from t5x.examples.t5 import network  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

from specdec_jax.checkpoints.t5x import load_params
from specdec_jax.models.t5 import T5Config
from specdec_jax.packaged import DEMO_DIRECTORY, resolve
from specdec_jax.t5x_adapter import SpeculativeEncoderDecoderModel
from specdec_jax.timing import interleaved
from specdec_jax.training.text import TASK_PREFIXES

_SIZES = ("vocab_size", "emb_dim", "num_heads", "num_encoder_layers", "num_decoder_layers", "head_dim", "mlp_dim")


def load(name: str):
    """One model of the demonstration pair: t5x's module and its weights."""
    params = load_params(resolve(f"demo:{name}"), progress=False)
    config = T5Config.from_params(params)
    sizes = {field: getattr(config, field) for field in _SIZES}
    t5 = network.T5Config(**sizes, mlp_activations=("gelu", "linear"), dropout_rate=0.0, dtype="float32")
    return network.Transformer(t5), freeze(jax.device_put(params))


def main() -> None:
    """Prints a line for each temperature."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--draft", default="draft_small")
    parser.add_argument("--task", default="ende", choices=sorted(TASK_PREFIXES))
    parser.add_argument("--num_examples", type=int, default=12)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    target, target_params = load("target")
    draft, draft_params = load(args.draft)
    vocabulary = seqio.SentencePieceVocabulary(resolve("demo:vocabulary"), extra_ids=0)
    lines = [json.loads(line) for line in (DEMO_DIRECTORY / "examples.jsonl").read_text().splitlines()]
    texts = [line["input"] for line in lines if line["task"] == args.task][: args.num_examples]
    partitioner = partitioning.PjitPartitioner(num_partitions=1)

    for temperature in (0.0, 1.0):
        decode_fn = functools.partial(decoding.temperature_sample, temperature=temperature, topk=0)
        common = {"module": target, "optimizer_def": None, "decode_fn": decode_fn}
        common |= {"input_vocabulary": vocabulary, "output_vocabulary": vocabulary}
        ours = functools.partial(SpeculativeEncoderDecoderModel, draft_module=draft, **common)
        stock = models.EncoderDecoderModel(**common)
        runs = [stock, ours(gamma=0), ours(gamma=args.gamma)]

        def step(model, params, draft_params, batch, rng):
            more = {} if type(model) is models.EncoderDecoderModel else {"flax_mutables": {"draft": draft_params}}
            return model.predict_batch_with_aux(params, batch, rng, **more)

        jitted = [partitioner.partition(functools.partial(step, model), (None,) * 4, None) for model in runs]
        ratios, per_call, same = [], [], 0
        for number, text in enumerate(texts):
            ids = [*vocabulary.encode(TASK_PREFIXES[args.task] + text), 1]
            encoder = np.zeros((1, 128), np.int32)
            encoder[0, : len(ids)] = ids
            batch = {"encoder_input_tokens": encoder, "decoder_input_tokens": np.zeros((1, 64), np.int32)}
            rng = jax.random.fold_in(jax.random.PRNGKey(0), number)
            calls = [functools.partial(run, target_params, draft_params, batch, rng) for run in jitted]
            timed = interleaved(calls, repeats=args.repeats)
            lengths = [int((np.asarray(one.value[0]) > 0).sum()) for one in timed]
            seconds = [one.seconds / length for one, length in zip(timed, lengths, strict=True)]
            ratios.append((seconds[0] / seconds[1], seconds[1] / seconds[2], seconds[0] / seconds[2]))
            per_call.append(lengths[2] / int(timed[2].value[1]["num_target_calls"][0]))
            same += all(np.array_equal(timed[0].value[0], one.value[0]) for one in timed[1:])
        columns = zip(*ratios, strict=True)
        names = ("target alone / t5x's decoder", "speculative / target alone", "speculative / t5x's decoder")
        told = [
            f"{name} {statistics.median(c):.2f} [{min(c):.2f}, {max(c):.2f}]"
            for name, c in zip(names, columns, strict=True)
        ]
        print(
            f"temperature {temperature:g}: speed per token, " + "; ".join(told) + f"; tokens per target call "
            f"{statistics.mean(per_call):.2f}; all three outputs equal for {same} of {len(texts)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
