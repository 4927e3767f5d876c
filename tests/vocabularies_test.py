"""Vocabularies: T5's ids, seqio's conventions, one-line errors."""

import pytest

from specdec_jax import vocabularies

_SYLLABLES = "the do gs qui ck bro wn fox jum ped ov er la zy über Zäu ne mit".split()
_SENTENCES = [
    " ".join(_SYLLABLES[i * k % 17] + _SYLLABLES[(i + k) % 17] for k in range(1, 9)) + f", {i * 7}." for i in range(300)
]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "tiny.model"
    vocabularies.train_sentencepiece(_SENTENCES, path, num_pieces=340)
    return path


def test_built_vocabulary_has_t5_ids_and_round_trips_any_text(model_file):
    vocabulary = vocabularies.load_vocabulary(model_file)
    assert vocabulary.size == 340
    for text in (_SENTENCES[3], "unseen: čaj 🍵 (x=42)!"):
        ids = vocabulary.encode(text)
        assert min(ids) > 2  # byte pieces stand in for characters never seen
        assert vocabulary.decode(ids) == text
    assert not list(model_file.parent.glob("*.tmp"))


def test_digits_are_single_pieces(model_file):
    vocabulary = vocabularies.load_vocabulary(model_file)
    assert len(vocabulary.encode("1234567")) >= 7


def test_extra_ids_are_appended_and_count_down(model_file):
    plain, extended = (
        vocabularies.load_vocabulary(model_file),
        vocabularies.load_vocabulary(model_file, extra_ids=100),
    )
    assert extended.size == 440
    assert extended.encode("<extra_id_0>")[-1] == 439
    assert extended.encode("<extra_id_99>")[-1] == 340
    assert extended.encode(_SENTENCES[0]) == plain.encode(_SENTENCES[0])


def test_decode_stops_at_eos_ignores_pads_and_reads_unknown_ids_as_unknown(model_file):
    vocabulary = vocabularies.load_vocabulary(model_file)
    ids = vocabulary.encode("the dog")
    assert vocabulary.decode([0, *ids, 1, *ids]) == "the dog"
    assert vocabulary.decode([*ids, 0, 0]) == "the dog"
    assert vocabulary.decode([340, 5000]) == vocabulary.decode([2, 2])


def test_bytes():
    vocabulary = vocabularies.load_vocabulary("bytes", extra_ids=125)
    assert vocabulary.size == 384
    assert vocabulary.encode("aé") == [97 + 3, 0xC3 + 3, 0xA9 + 3]
    assert vocabulary.decode([0, 100, 0xC3 + 3, 0xA9 + 3, 300, 2, 1, 100]) == "aé"
    assert vocabulary.decode([0xC3 + 3, 100]) == "a"  # broken UTF-8 is ignored


def test_batch_encoding_is_encoding_one_by_one(model_file):
    for vocabulary in (vocabularies.load_vocabulary(model_file), vocabularies.ByteVocabulary()):
        assert vocabulary.encode_batch(_SENTENCES[:5]) == [vocabulary.encode(text) for text in _SENTENCES[:5]]


def test_errors_are_one_line_that_names_the_file(tmp_path):
    broken = tmp_path / "broken.model"
    broken.write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"^[^\n]*absent\.model[^\n]*give a \.model file$"):
        vocabularies.load_vocabulary(tmp_path / "absent.model")
    with pytest.raises(ValueError, match=r"^[^\n]*broken\.model[^\n]*not a SentencePiece model[^\n]*$"):
        vocabularies.load_vocabulary(broken)
    with pytest.raises(ValueError, match="extra_ids=-1"):
        vocabularies.load_vocabulary("bytes", extra_ids=-1)
    with pytest.raises(ValueError, match="no text"):
        vocabularies.train_sentencepiece([], tmp_path / "new.model")
    with pytest.raises(ValueError, match="num_pieces=100000"):
        vocabularies.train_sentencepiece(_SENTENCES, tmp_path / "new.model", num_pieces=100_000)
