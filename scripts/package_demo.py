"""Packages the demonstration pair: a run's last checkpoint as bfloat16, the vocabulary, and test examples.

python scripts/package_demo.py checkpoint --run_dir=/tmp/demo/target --output=specdec_jax/data/demo/target
python scripts/package_demo.py examples --ende=ende.tsv.gz --summ=summ.tsv.gz --vocabulary=vocabulary.model \
    --output=specdec_jax/data/demo
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import sys

import jax.numpy as jnp

from specdec_jax.checkpoints import t5x
from specdec_jax.training import text
from specdec_jax.vocabularies import load_vocabulary

NUM_EXAMPLES = {"ende": 150, "summarize": 100, "restore": 100}


def package_checkpoint(run_dir: str, output: str) -> None:
    """Writes the newest checkpoint of a run as the only one of `output`, its weights rounded to bfloat16."""
    step = max(t5x.list_steps(run_dir))
    params = t5x.load_params(os.path.join(run_dir, f"checkpoint_{step}"), dtype=jnp.bfloat16)
    shutil.rmtree(output, ignore_errors=True)
    print(t5x.save_checkpoint(output, params, step=step))


def package_examples(ende: str, summ: str, vocabulary_path: str, output: str, max_input: int, max_target: int) -> None:
    """Writes examples.jsonl, a seeded choice of test examples that are not cut, and the vocabulary."""
    vocabulary = load_vocabulary(vocabulary_path)
    lines = []
    for task, pairs in text.read_tasks(split="test", ende=ende, summ=summ).items():
        pairs = [
            pair
            for pair in pairs
            if len(vocabulary.encode(pair.source)) < max_input and 3 < len(vocabulary.encode(pair.target)) < max_target
        ]
        for pair in random.Random(0).sample(pairs, NUM_EXAMPLES[task]):
            example = {
                "task": task,
                "input": pair.source.removeprefix(text.TASK_PREFIXES[task]),
                "reference": pair.target,
            }
            lines.append(json.dumps(example, ensure_ascii=False) + "\n")
    directory = pathlib.Path(output)
    partial = directory / "examples.jsonl.partial"
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(directory / "examples.jsonl")
    shutil.copyfile(vocabulary_path, directory / "vocabulary.model")
    print(f"{directory / 'examples.jsonl'}: {len(lines)} examples")


def main() -> None:
    """Parses the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    checkpoint = commands.add_parser("checkpoint", help="a run's newest checkpoint, as bfloat16")
    checkpoint.add_argument("--run_dir", required=True)
    checkpoint.add_argument("--output", required=True, help="its former content is removed")
    examples = commands.add_parser("examples", help="test examples and the vocabulary")
    for name in ("ende", "summ", "vocabulary", "output"):
        examples.add_argument(f"--{name}", required=True)
    examples.add_argument("--max_input", type=int, default=128, help="tokens, end included")
    examples.add_argument("--max_target", type=int, default=64, help="tokens, end included")
    args = parser.parse_args()
    if args.command == "checkpoint":
        package_checkpoint(args.run_dir, args.output)
    else:
        package_examples(args.ende, args.summ, args.vocabulary, args.output, args.max_input, args.max_target)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
