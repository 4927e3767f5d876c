"""A seqio task over a text file, so that t5x.infer needs no TFExamples."""

import hashlib
from collections.abc import Mapping
from typing import Any

import seqio
import tensorflow as tf


def text_file_task(path: str, features: Mapping[str, Any], prefix: str = "") -> str:
    """Registers a task whose inputs are the lines of a text file.

    Args:
      path: the file, local or gs://, UTF-8, one input per line.
      features: a seqio.Feature each for "inputs" and "targets", with the model's vocabularies.
      prefix: what is put before each line, such as "translate English to German: ".

    Returns:
      The task's name; its split is "infer".

    Raises:
      ValueError: there is no such file, it holds nothing, or a line is empty or not UTF-8.
    """
    if not tf.io.gfile.exists(path):
        raise ValueError(f"{path}: no such file; give a text file with one input per line.")
    with tf.io.gfile.GFile(path, "rb") as file:
        lines = file.read().splitlines()
    if not lines:
        raise ValueError(f"{path}: there is no line; give one input per line.")
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: line {number} is not UTF-8; every line must be text in UTF-8.") from error
        if not text.strip() or text.startswith("\ufeff"):
            wrong = "starts with a byte order mark" if text.strip() else "is empty"
            raise ValueError(f"{path}: line {number} {wrong}; every line must be text and nothing else.")

    def to_example(line: Any) -> dict[str, Any]:
        return {"inputs": tf.strings.join([prefix, line]), "targets": ""}

    vocabularies = [repr(features[name].vocabulary) for name in sorted(features)]
    name = "infer_" + hashlib.sha256(repr((path, prefix, vocabularies)).encode()).hexdigest()[:10]
    if name not in seqio.TaskRegistry.names():
        seqio.TaskRegistry.add(
            name,
            source=seqio.TextLineDataSource({"infer": path}),  # pyright: ignore[reportArgumentType]
            preprocessors=[
                lambda dataset: dataset.map(to_example, num_parallel_calls=tf.data.AUTOTUNE),
                seqio.preprocessors.tokenize_and_append_eos,
            ],
            output_features=features,
        )
    return name
