"""Trains a small T5, or distils one from a target checkpoint; a killed run goes on when started again.

python scripts/train.py --ende=ende.tsv.gz --summ=summ.tsv.gz --vocabulary=vocabulary.model --emb_dim=256 \
    --num_heads=4 --head_dim=64 --mlp_dim=640 --num_encoder_layers=3 --num_decoder_layers=5 \
    --minutes=60 --run_dir=/tmp/target
python scripts/train.py ... --distill_from=/tmp/target/checkpoint_4000 --run_dir=/tmp/draft
"""

import argparse
import pathlib
import sys

import jax
import jax.numpy as jnp

from specdec_jax.checkpoints import t5x
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.training import batches, examples, loop, narrowing, step, text
from specdec_jax.vocabularies import load_vocabulary

_SIZES = ("emb_dim", "num_heads", "head_dim", "mlp_dim", "num_encoder_layers", "num_decoder_layers")
_SCHEDULE = ("steps", "minutes", "save_minutes", "validate_every")
_OPTIMIZATION = ("peak_learning_rate", "warmup_steps", "ema_decay", "label_smoothing", "divergence_weight")
_RATES = {"ende": 0.5, "summarize": 0.2, "restore": 0.3, "pairs": 1.0}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", required=True, help="checkpoints, metrics and the token cache go here")
    parser.add_argument("--vocabulary", required=True, help="SentencePiece .model file, or 'bytes'")
    parser.add_argument("--ende", help="TSV of English, German, split: tasks ende and restore")
    parser.add_argument("--summ", help="TSV of description, summary, split: task summarize")
    parser.add_argument("--pairs", help="TSV of input with prefix, output: task pairs")
    for name, rate in _RATES.items():
        parser.add_argument(f"--{name}_rate", type=float, default=rate, help=f"relative share of {name} examples")
    for name in _SIZES:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", default="float32", help="of activations; bfloat16 on GPU and TPU")
    parser.add_argument("--minutes", type=float, help="time budget, earlier processes of this run included")
    parser.add_argument("--steps", type=int, help="number of steps, instead of --minutes")
    parser.add_argument("--save_minutes", type=float, default=5.0)
    parser.add_argument("--validate_every", type=int, default=500, help="steps")
    parser.add_argument("--batch_tokens", type=int, default=4096, help="source and target tokens, padding included")
    parser.add_argument("--max_source", type=int, default=128, help="longer sources are cut")
    parser.add_argument("--max_target", type=int, default=64, help="examples with longer targets are dropped")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak_learning_rate", type=float, default=1.5e-3)
    parser.add_argument("--warmup_steps", type=int, default=200)
    parser.add_argument("--ema_decay", type=float, default=0.995)
    parser.add_argument("--label_smoothing", type=float, default=0.0)
    parser.add_argument("--distill_from", help="T5X checkpoint of the frozen target model")
    parser.add_argument("--divergence_weight", type=float, default=0.9, help="the rest is cross-entropy")
    parser.add_argument("--init_from", help="T5X checkpoint to start from; of a larger one, what fits is taken")
    return parser.parse_args()


def main() -> None:
    """Reads the text, tokenizes it once, and trains."""
    args = _arguments()
    run_dir = pathlib.Path(args.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(run_dir.absolute() / "compiled"))  # for resuming
    vocabulary = load_vocabulary(args.vocabulary)
    limits = {"max_source": args.max_source, "max_target": args.max_target}
    files = {"ende": args.ende, "summ": args.summ, "pairs": args.pairs}
    train, valid = (
        examples.tokenize_cached(text.read_tasks(split=split, **files), vocabulary, run_dir, **limits)
        for split in ("train", "valid")
    )
    rates = tuple((name, getattr(args, f"{name}_rate")) for name in train)
    config = T5Config(
        vocab_size=-(-vocabulary.size // 128) * 128,  # a multiple of 128, as T5's are
        dtype=jnp.dtype(args.dtype),
        **{name: getattr(args, name) for name in _SIZES},
    )
    teacher = None
    if args.distill_from:
        target_params = t5x.load_params(args.distill_from)
        teacher = step.Teacher(T5(T5Config.from_params(target_params, dtype=config.dtype)), target_params)
    model = T5(config)
    initial = None
    if args.init_from:
        initial = narrowing.fit(t5x.load_params(args.init_from, dtype=jnp.float32), config)
    optimization = step.Optimization(**{name: getattr(args, name) for name in _OPTIMIZATION})
    mixture = batches.Mixture(rates=rates, batch_tokens=args.batch_tokens, seed=args.seed, **limits)
    schedule = loop.Schedule(**{name: getattr(args, name) for name in _SCHEDULE})
    settings = {"mixture": mixture, "optimization": optimization, "schedule": schedule}
    loop.train(model, train, valid, run_dir, **settings, teacher=teacher, initial_params=initial)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
