"""Builds the joint SentencePiece vocabulary of the demonstration pair from its training text.

python scripts/build_vocabulary.py --ende=ende.tsv.gz --summ=summ.tsv.gz --output=vocabulary.model
"""

import argparse
import sys

from specdec_jax import vocabularies
from specdec_jax.training import text


def main() -> None:
    """Reads the training split of both files and writes the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ende", required=True, help="TSV of English, German, split, ...")
    parser.add_argument("--summ", required=True, help="TSV of description, one-line summary, split, ...")
    parser.add_argument("--output", required=True, help="the .model file to write")
    parser.add_argument("--num_pieces", type=int, default=4096, help="pieces, special ids and bytes included")
    args = parser.parse_args()
    texts = text.vocabulary_texts(text.read_tasks(split="train", ende=args.ende, summ=args.summ))
    vocabularies.train_sentencepiece(texts, args.output, num_pieces=args.num_pieces)
    vocabulary = vocabularies.load_vocabulary(args.output)
    tokens = sum(len(ids) for ids in vocabulary.encode_batch(texts[:10_000]))
    characters = sum(len(line) for line in texts[:10_000])
    print(
        f"{args.output}: {vocabulary.size} pieces, {characters / tokens:.2f} characters a token",
        file=sys.stderr,
    )


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
