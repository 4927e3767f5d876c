"""BLEU and ROUGE of the demonstration models on the packaged test examples, decoded greedily.

python scripts/evaluate_demo.py [demo:target demo:draft_small ...]

Needs the extra `metrics`. Prints one line per model and task: sacrebleu's BLEU, or ROUGE-1 / ROUGE-L F1 for summaries.
"""

import json
import sys

import sacrebleu
from rouge_score import rouge_scorer

from specdec_jax import generation
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.packaged import DEMO_DIRECTORY, model_names, resolve
from specdec_jax.settings import Settings
from specdec_jax.training.text import TASK_PREFIXES
from specdec_jax.vocabularies import load_vocabulary


def outputs(pair: generation.Pair, inputs: list[str], prefix: str) -> list[str]:
    """Greedy outputs of one model."""
    settings = Settings(gamma=1, batch_size=25, max_input_length=128, task_prefix=prefix)
    encoded = generation.encode(inputs, pair.vocabulary, settings)
    decoded = []
    for batch in generation.make_batches(encoded, pair.vocabulary, settings, length=128):
        result = generation.decode_plainly(pair, batch, settings)
        decoded += [output.text for output in generation.read_outputs(result, batch, pair.vocabulary)]
    return decoded


def main() -> None:
    """Evaluates each model named on the command line, every one without a name."""
    names = sys.argv[1:] or [f"demo:{name}" for name in model_names()]
    with open(DEMO_DIRECTORY / "examples.jsonl", encoding="utf-8") as file:
        examples = [json.loads(line) for line in file]
    scorer = rouge_scorer.RougeScorer(["rouge1", "rougeL"])
    vocabulary = load_vocabulary(resolve("demo:vocabulary"))
    for name in names:
        model, params = generation.load_model(name)
        alone = generation.Pair(model, params, ModelDrafter(model), params, vocabulary)  # plainly: no draft
        for task, prefix in TASK_PREFIXES.items():
            rows = [example for example in examples if example["task"] == task]
            hypotheses = outputs(alone, [row["input"] for row in rows], prefix)
            references = [row["reference"] for row in rows]
            if task == "summarize":
                scores = [scorer.score(r, h) for r, h in zip(references, hypotheses, strict=True)]
                mean = [100 * sum(s[kind].fmeasure for s in scores) / len(scores) for kind in ("rouge1", "rougeL")]
                print(f"{name} {task}: ROUGE-1 {mean[0]:.1f}, ROUGE-L {mean[1]:.1f}", flush=True)
            else:
                bleu = sacrebleu.corpus_bleu(hypotheses, [references])
                print(f"{name} {task}: BLEU {bleu.score:.1f}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
