"""Ids and texts of our vocabularies against seqio's, which T5X's checkpoints were trained with."""

import itertools

import pytest
import sentencepiece

from specdec_jax import vocabularies

seqio = pytest.importorskip("seqio", reason="seqio is not installed: there are no vocabularies to compare with")

SENTENCES = [
    f"{who} {does} {what} {when}."
    for who, does, what, when in itertools.product(
        ("Die Bäckerin", "Our neighbour", "Der große Hund", "Nobody"),
        ("frißt", "quickly counts", "überquert", "sells"),
        ("zwölf Äpfel", "the brown fox", "42 Brücken", "a naïve café"),
        ("am Morgen", "every day, twice"),
    )
]
TEXTS = [
    *SENTENCES[::7],
    "",
    " ",
    "  two  spaces\tand a tab\nand a line ",
    "Fünf größere Äpfel, Übermut: 3,50 € („so“)!",
    "never seen: čaj 中文 עברית",
    "emoji 🍵, a family 👩‍👩‍👧 and a flag 🇩🇪",
    "e\u0301 decomposed, ﬁ a ligature, ½ and Å",  # which T5's published vocabulary normalises
    "I like <extra_id_0> and <extra_id_17>, not <extra_id_99>ly nor jel<extra_id_3>",
    "</s> <unk> <pad> ▁",
]
SHAPES = {  # what is decoded, from the ids of a text and the size of the vocabulary
    "whole": lambda ids, size: ids,
    "cut at the end": lambda ids, size: ids[: len(ids) // 2],
    "cut at the start": lambda ids, size: ids[1:],
    "end and pads": lambda ids, size: [*ids, 1, 0, 0],
    "two ends": lambda ids, size: [*ids, 1, *ids, 1],
    "pads after": lambda ids, size: [*ids, 0, 0],
    "start token": lambda ids, size: [0, *ids, 1],
    "pads within": lambda ids, size: [*ids, 0, *ids],
    "unknown": lambda ids, size: [2, *ids, 2, 2, *ids],
    "the last id": lambda ids, size: [*ids, size - 1],
    "padded logits": lambda ids, size: [size, *ids, size + 27],
}
KINDS = ("sentencepiece", "normalised", "bytes")


@pytest.fixture(scope="module")
def model_files(tmp_path_factory):
    """Our own kind of model, and one like T5's published vocabulary: normalised text, no pieces for unseen bytes."""
    folder = tmp_path_factory.mktemp("vocabularies")
    vocabularies.train_sentencepiece(SENTENCES, folder / "sentencepiece.model", num_pieces=310)
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(folder / "normalised"),
        vocab_size=60,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return folder


@pytest.fixture(scope="module", params=itertools.product(KINDS, (0, 100)), ids=lambda p: f"{p[0]}+{p[1]}")
def pair(request, model_files):
    kind, extra_ids = request.param
    if kind == "bytes":
        return vocabularies.ByteVocabulary(extra_ids), seqio.ByteVocabulary(extra_ids)
    path = str(model_files / f"{kind}.model")
    return vocabularies.SentencePieceVocabulary(path, extra_ids), seqio.SentencePieceVocabulary(path, extra_ids)


def test_sizes_and_special_ids_are_seqio_s(pair):
    ours, theirs = pair
    assert ours.size == theirs.vocab_size
    assert (ours.pad_id, ours.eos_id, ours.unk_id) == (theirs.pad_id, theirs.eos_id, theirs.unk_id)


def test_ids_are_seqio_s(pair):
    ours, theirs = pair
    assert {text: ours.encode(text) for text in TEXTS} == {text: list(theirs.encode(text)) for text in TEXTS}


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_are_seqio_s(pair, shape):
    ours, theirs = pair
    given = [SHAPES[shape](ours.encode(text), ours.size) for text in TEXTS]
    assert [ours.decode(ids) for ids in given] == [theirs.decode(ids) for ids in given]
