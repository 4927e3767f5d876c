"""Text to token ids and back: SentencePiece models and UTF-8 bytes, with the ids of seqio's vocabularies.

Every vocabulary here has pad 0, end of sequence 1 and unknown 2, as all T5 models do. The ids of one text are
the same as seqio's for the same model file and the same number of extra ids, so published checkpoints work
unchanged:

    SentencePieceVocabulary("spiece.model", extra_ids=100)    # 32 000 pieces, <extra_id_99> to <extra_id_0>
    ByteVocabulary(extra_ids=125)                             # ByT5: 3 specials + 256 bytes + 125 = 384
"""

import io
import itertools
import os
import pathlib
import struct
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import sentencepiece

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2
_NUM_SPECIAL_IDS = 3


@runtime_checkable
class Vocabulary(Protocol):
    """What the rest of the package needs from a vocabulary."""

    pad_id: int
    eos_id: int
    unk_id: int

    @property
    def size(self) -> int:
        """Number of valid ids, special and extra ids included; a model may pad its logits beyond it."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without an end-of-sequence id."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text up to the first end-of-sequence id; pads are ignored."""
        ...


class SentencePieceVocabulary:
    """A SentencePiece `.model` file with T5's sentinel pieces appended.

    The extra pieces come after the file's own and count down, so that `<extra_id_0>` has the last id of all.

    Attributes:
      path: the model file.
      extra_ids: number of sentinel pieces appended.
    """

    pad_id, eos_id, unk_id = PAD_ID, EOS_ID, UNK_ID

    def __init__(self, path: str | os.PathLike[str], extra_ids: int = 0):
        """Loads a model file.

        Args:
          path: a SentencePiece `.model` file.
          extra_ids: number of sentinel pieces to append; 100 for T5's published vocabulary.

        Raises:
          ValueError: the file is missing or not a SentencePiece model, its special ids are not T5's, or
            extra_ids is negative.
        """
        self.path = str(path)
        self.extra_ids = _checked_extra_ids(extra_ids)
        try:
            model = pathlib.Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read vocabulary {self.path!r} ({error.strerror}): give a .model file") from error
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model + _sentinel_pieces(extra_ids))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"vocabulary {self.path!r} is not a SentencePiece model: give a .model file") from error
        found = (self._processor.pad_id(), self._processor.eos_id(), self._processor.unk_id())
        if found != (PAD_ID, EOS_ID, UNK_ID):
            raise ValueError(f"vocabulary {self.path!r} has (pad, eos, unk) ids {found}: T5 models need (0, 1, 2)")

    @property
    def size(self) -> int:
        """Number of valid ids, extra ids included."""
        return self._processor.get_piece_size()

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without an end-of-sequence id."""
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, using all cores."""
        return self._processor.encode(list(texts), num_threads=os.cpu_count() or 1)

    def decode(self, ids: Iterable[int]) -> str:
        """Text up to the first end-of-sequence id; pads are ignored and ids out of range read as unknown."""
        valid = range(self.size)
        known = [id_ if id_ in valid else UNK_ID for id_ in _until_eos(ids)]
        return self._processor.decode([id_ for id_ in known if id_ != PAD_ID])


class ByteVocabulary:
    """UTF-8 bytes: byte b has id b + 3; extra ids follow and have no text.

    Attributes:
      extra_ids: number of ids after the 259 of specials and bytes; 125 for ByT5's published models.
    """

    pad_id, eos_id, unk_id = PAD_ID, EOS_ID, UNK_ID

    def __init__(self, extra_ids: int = 0):
        """Creates the vocabulary.

        Args:
          extra_ids: number of sentinel ids after the bytes.

        Raises:
          ValueError: extra_ids is negative.
        """
        self.extra_ids = _checked_extra_ids(extra_ids)

    @property
    def size(self) -> int:
        """Number of valid ids, extra ids included."""
        return _NUM_SPECIAL_IDS + 256 + self.extra_ids

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without an end-of-sequence id."""
        return [byte + _NUM_SPECIAL_IDS for byte in text.encode("utf-8")]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text up to the first end-of-sequence id; ids that are no byte and broken UTF-8 are ignored."""
        encoded = [id_ - _NUM_SPECIAL_IDS for id_ in _until_eos(ids)]
        return bytes(byte for byte in encoded if 0 <= byte < 256).decode("utf-8", errors="ignore")


def load_vocabulary(spec: str | os.PathLike[str], extra_ids: int = 0) -> SentencePieceVocabulary | ByteVocabulary:
    """Vocabulary named by a command line or a gin file.

    Args:
      spec: a path to a SentencePiece `.model` file, or "bytes".
      extra_ids: number of sentinel ids to append.

    Returns:
      The vocabulary.

    Raises:
      ValueError: the model file is missing or unreadable.
    """
    return ByteVocabulary(extra_ids) if spec == "bytes" else SentencePieceVocabulary(spec, extra_ids)


def train_sentencepiece(texts: Iterable[str], path: str | os.PathLike[str], *, num_pieces: int = 4096) -> None:
    """Builds a unigram SentencePiece model with T5's special ids and writes it.

    Bytes stand in for rare characters, so no text is ever unknown; digits are pieces of their own, so that
    numbers copy digit by digit.

    Args:
      texts: training sentences.
      path: the `.model` file to write; replaced only once the new one is complete.
      num_pieces: number of pieces, the 3 special ids and 256 bytes included.

    Raises:
      ValueError: there is no text, or too little for so many pieces.
    """
    sentences = iter(texts)
    first = next(sentences, None)
    if first is None:
        raise ValueError("cannot build a vocabulary from no text: give at least one sentence")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=itertools.chain([first], sentences),
            model_writer=model,
            vocab_size=num_pieces,
            model_type="unigram",
            pad_id=PAD_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            bos_id=-1,
            byte_fallback=True,
            split_digits=True,
            character_coverage=0.9998,
            normalization_rule_name="identity",
            num_threads=os.cpu_count() or 1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[-1]
        raise ValueError(f"cannot build num_pieces={num_pieces} from this text: {reason}") from error
    path = pathlib.Path(path)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_bytes(model.getvalue())
    unfinished.replace(path)


def _checked_extra_ids(extra_ids: int) -> int:
    if extra_ids < 0:
        raise ValueError(f"extra_ids={extra_ids} is negative: give 0 or more")
    return extra_ids


def _until_eos(ids: Iterable[int]) -> list[int]:
    return [int(id_) for id_ in itertools.takewhile(lambda id_: id_ != EOS_ID, ids)]


def _sentinel_pieces(extra_ids: int) -> bytes:
    """Serialized `pieces` entries for `<extra_id_{n-1}>` down to `<extra_id_0>`.

    A SentencePiece model is one protocol buffer, and concatenating two serialized messages appends their
    repeated fields: this adds pieces to a model without needing the protobuf package.
    """
    entries = []
    for index in reversed(range(extra_ids)):
        piece = f"\u2581<extra_id_{index}>".encode()
        # SentencePiece{piece = 1, score = 2 (float), type = 3 (USER_DEFINED = 4)}; all lengths are below 128.
        entry = bytes([0x0A, len(piece)]) + piece + b"\x15" + struct.pack("<f", 0.0) + b"\x18\x04"
        entries.append(bytes([0x0A, len(entry)]) + entry)
    return b"".join(entries)
