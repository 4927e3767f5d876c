"""The pair of byte models that T5X trained to write words in upper case, and what T5X decoded with it."""

import json
import pathlib
from typing import Any

from specdec_jax.settings import Models

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
TARGET = str(FIXTURES / "mini_target" / "legacy_f32" / "checkpoint_1500")
DRAFT = str(FIXTURES / "mini_draft" / "legacy_f32" / "checkpoint_1500")
MODELS = Models(target_checkpoint=TARGET, draft_checkpoint=DRAFT, vocabulary="bytes")
LIMITS = {"max_decode_length": 32, "max_input_length": 32}  # of all tests, so that few programs are compiled


def greedy_outputs() -> list[dict[str, Any]]:
    """What t5x.infer wrote: inputs, prediction, prediction_tokens, aux.scores."""
    lines = (FIXTURES / "infer" / "target_greedy.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
