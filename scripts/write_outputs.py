"""Writes what a model says to training text, as pairs for a draft model to learn from (see train.py's --pairs).

python scripts/write_outputs.py --checkpoint=/tmp/target/checkpoint_4000 --vocabulary=vocabulary.model \
    --ende=ende.tsv.gz --summ=summ.tsv.gz --num=8000 --output=/tmp/outputs.tsv

A draft meets the target's own text when it drafts, which is easier than people's. Every other batch is decoded
greedily, the others are sampled. With --shard=I/N only every N-th input from the I-th on is decoded.
"""

import argparse
import pathlib
import random
import sys
import time

from specdec_jax import generation
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.settings import Settings
from specdec_jax.training import text
from specdec_jax.vocabularies import load_vocabulary

BATCH_SIZE = 64
MAX_SOURCE = 128  # tokens, as in training


def main() -> None:
    """Decodes a seeded choice of training inputs, shortest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("checkpoint", "vocabulary", "ende", "summ", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--num", type=int, default=8000, help="inputs, all shards together")
    parser.add_argument("--shard", default="0/1", metavar="I/N")
    args = parser.parse_args()
    shard, num_shards = map(int, args.shard.split("/"))
    vocabulary = load_vocabulary(args.vocabulary)
    model, params = generation.load_model(args.checkpoint)
    alone = generation.Pair(model, params, ModelDrafter(model), params, vocabulary)  # plainly: no draft
    tasks = text.read_tasks(split="train", ende=args.ende, summ=args.summ)
    sources = [pair.source for pairs in tasks.values() for pair in pairs]
    sources = random.Random(0).sample(sources, min(args.num, len(sources)))[shard::num_shards]
    by_length = sorted((len(ids), source, ids) for source in sources if (ids := vocabulary.encode(source)))
    kept = [(source, [*ids, vocabulary.eos_id]) for length, source, ids in by_length if length < MAX_SOURCE]
    lines, began = [], time.monotonic()
    for number, start in enumerate(range(0, len(kept), BATCH_SIZE)):
        rows = kept[start : start + BATCH_SIZE]
        temperature = float(number % 2)
        settings = Settings(gamma=1, batch_size=BATCH_SIZE, max_input_length=MAX_SOURCE, temperature=temperature)
        (batch,) = generation.make_batches([ids for _, ids in rows], vocabulary, settings)
        result = generation.decode_plainly(alone, batch._replace(seeds=batch.seeds + start), settings)
        for (source, _), output in zip(rows, generation.read_outputs(result, batch, vocabulary), strict=True):
            if output.finish_reason == "eos" and output.text.strip():
                lines.append("\t".join(" ".join(part.split()) for part in (source, output.text)) + "\n")
        if number % 10 == 9:
            rate = (start + len(rows)) / (time.monotonic() - began)
            print(f"{start + len(rows)} of {len(kept)} inputs, {rate:.0f} a second", file=sys.stderr, flush=True)
    partial = pathlib.Path(args.output + ".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(args.output)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
