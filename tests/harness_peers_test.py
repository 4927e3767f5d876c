"""Peers beside this package: figures by hand, what is not there, and that all of them decode the same."""

import dataclasses
import functools
import importlib
import json

import jax
import mini_pair
import numpy as np
import pytest
import tiny

from specdec_jax.checkpoints import huggingface
from specdec_jax.harness import peer_decoders, peers
from specdec_jax.harness.peer_decoders import MODES, PLAIN, SPECULATIVE, Mode
from specdec_jax.settings import Models, Settings

TEXTS = ["blue", "bird dog", "south moon north"]
SETTINGS = Settings(gamma=3, **mini_pair.LIMITS)


def measure(settings=SETTINGS, *, texts=TEXTS, rounds=1, models=mini_pair.MODELS, **kwargs):
    document = peers.measure(models, settings, texts, rounds=rounds, **kwargs)
    return document, {f"{entry['peer']} {entry['mode']}": entry for entry in document["peers"]}


@pytest.fixture
def none_installed(monkeypatch):
    monkeypatch.setattr(peers, "_is_installed", lambda package: False)


def test_what_is_not_installed_is_said_to_be_missing(none_installed):
    told = []
    document, entries = measure(rounds=3, report=told.append)
    assert json.loads(json.dumps(document)) == document
    assert list(entries) == list(MODES)
    for name in (SPECULATIVE, PLAIN):
        entry = entries.pop(name)
        assert np.shape(entry["seconds"]) == (3, 3) and np.min(entry["seconds"]) > 0
        assert entry["tokens"] == [len(text) + 1 for text in TEXTS]  # bytes and the end
        assert (entry["equal"], entry["num_prompts"], entry["differences"]) == (3, 3, [])
        assert entry["low"] <= entry["tokens_per_second"] <= entry["high"]
    assert document["peers"][0]["ratio"] == document["peers"][0]["ratio_high"] == 1
    assert entries.pop("t5x temperature_sample")["reason"] == "not installed: t5x, seqio"
    assert all("not installed: " in entry["reason"] and "seconds" not in entry for entry in entries.values())
    assert "torch" not in document["versions"] and document["versions"]["jax"]
    assert document["settings"]["gamma"] == 3 and document["settings"]["dtype"] == "float32"
    assert told == ["loading specdec_jax", *(f"decoding prompt {i} of 3" for i in (1, 2, 3))]

    table = peers.table(document)
    assert all(len(row) == len(table.columns) for row in table.rows) and len(table.rows) == len(MODES)
    assert table.rows[-1][:2] == ["t5x", "temperature_sample"] and table.rows[-1][3] is None
    assert sum(row[2] == "yes" for row in table.rows) == 1
    assert "t5x temperature_sample was not measured: not installed: t5x, seqio." in table.notes


def test_a_folder_is_not_an_installed_package(tmp_path, monkeypatch):
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "a_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    found = [peers._is_installed(name) for name in ("a_folder", "a_module", "nowhere_at_all")]
    assert found == [False, True, False]


def test_figures_by_hand():
    ours, theirs = [[1.0, 2.0, 9.0], [2.0, 2.0, 2.0]], [[2.0, 4.0, 18.0], [4.0, 4.0, 4.0]]
    figures = peers.summarize(theirs, [8, 8], ours, [8, 8])  # 2 and 2 tokens per second
    assert figures == pytest.approx(
        {"tokens_per_second": 2, "low": 2, "high": 2, "ratio": 2, "ratio_low": 2, "ratio_high": 2}
    )
    figures = peers.summarize(theirs, [8, 16], ours, [8, 8])  # the peer wrote more in that time: ratios 2 and 1
    assert figures["ratio"] == pytest.approx(2**0.5)
    assert (figures["ratio_low"], figures["ratio_high"]) == pytest.approx((1, 2))  # two prompts say little
    assert (figures["low"], figures["tokens_per_second"], figures["high"]) == pytest.approx((2.5, 3, 3.5))


def test_a_slow_minute_counts_for_neither():
    ours, theirs = [[1.0, 1.0, 5.0, 5.0, 5.0]], [[2.0, 2.0, 10.0, 10.0, 2.0]]
    alone = peers.summarize(theirs, [4], ours, [4])
    assert alone["ratio"] == 2  # of medians, it would be 0.4
    assert alone["ratio_low"] is None and alone["ratio_high"] is None  # one prompt says nothing about the spread


class Fake:
    """A peer that says what it is told to, and notes what it was asked."""

    def __init__(self, answer):
        self.answer, self.prompts, self.calls = answer, [], 0

    def load(self, weights, settings):
        return {"fake mode": Mode(self.start, lambda rows: rows)}

    def start(self, prompt):
        self.prompts.append(prompt)
        return lambda: [self.say(ids) for ids in prompt.ids]

    def say(self, ids):
        self.calls += 1
        return self.answer(ids)


@pytest.fixture
def fake(none_installed, monkeypatch):
    def install(answer):
        found = Fake(answer)
        monkeypatch.setitem(MODES, "fake mode", ())
        monkeypatch.setitem(peer_decoders.LOADERS, "fake", found.load)
        return found

    return install


def upper(ids):
    return [token - 32 if token >= ord("a") + 3 else token for token in ids]


def test_a_difference_is_told_with_its_place_and_margin(fake):
    fake(
        lambda ids: upper(ids) if len(ids) != 9 else [*upper(ids)[:3], *ids[3:], 7, 7]
    )  # what is behind the end is cut
    document, entries = measure()
    found = entries["fake mode"]
    assert (found["equal"], found["num_prompts"], found["tokens"]) == (2, 3, [5, 9, 17])
    (difference,) = found["differences"]
    assert (difference["input"], difference["token"]) == (2, 4)
    assert difference["margin"] > 1 and not difference["near_tie"]
    assert any(
        "input 2 differs from token 4 on" in note and "NOT a near tie" in note for note in peers.table(document).notes
    )


def test_a_batch_is_a_prompt_and_assisted_generation_is_left_out(fake, monkeypatch):
    names = ("transformers assisted", "transformers assisted by gamma")
    for name in names:
        monkeypatch.setitem(MODES, name, ())  # as if there were all that it needs
    found = fake(upper)
    _, entries = measure(dataclasses.replace(SETTINGS, batch_size=2))
    assert [[len(ids) for ids in prompt.ids] for prompt in found.prompts] == [[5, 9], [17]]
    assert [prompt.batch.inputs.encoder_tokens.shape[0] for prompt in found.prompts] == [2, 2]
    assert entries["fake mode"]["equal"] == 3 and entries["fake mode"]["tokens"] == [14, 17]
    assert entries[PLAIN]["tokens"] == [14, 17]  # the copy that fills the last batch does not count
    for name in names:
        assert entries[name]["reason"] == "transformers' assisted generation takes one input at a time"


def test_the_first_to_decode_and_the_neighbours_change():
    order = []

    def mode(name):
        return Mode(lambda prompt: functools.partial(order.append, name), lambda rows: rows)

    modes = {name: mode(name) for name in "abc"}
    for number in range(4):
        assert list(peers._time(modes, peer_decoders.Prompt._make((None, [])), number, rounds=1)) == order[-3:]
        order.append(" ")
    assert "".join(order) == "abcabc acbacb cabcab cbacba "  # one untimed round, then the timed one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 1.0}, "temperature is 1.0; peers are compared by greedy decoding .* leave it at 0.0"),
        ({"top_k": 5}, "top_k is 5"),
        ({"top_p": 0.9}, "top_p is 0.9"),
        ({"repetition_penalty": 1.5}, "repetition_penalty is 1.5"),
        ({"forbidden_ids": (7,)}, r"forbidden_ids is \(7,\)"),
        ({"lenience": 0.5}, "lenience is 0.5"),
        ({"mesh": (1, 1)}, r"mesh is \(1, 1\)"),
    ],
)
def test_settings_that_peers_do_not_share(changes, message):
    with pytest.raises(ValueError, match=message):
        measure(dataclasses.replace(SETTINGS, **changes))


def test_other_errors(monkeypatch):
    with pytest.raises(ValueError, match="rounds is 0"):
        measure(rounds=0)
    with pytest.raises(ValueError, match="dtype is 'bfloat16'; peers are compared in float32"):
        measure(models=dataclasses.replace(mini_pair.MODELS, dtype="bfloat16"))
    with pytest.raises(ValueError, match="only has 'vllm'; it must hold names of .*'ctranslate2 greedy'"):
        measure(only=["vllm"])
    with pytest.raises(ValueError, match="batch_size is 2; transformers' assisted .* set it to 1, or leave"):
        measure(dataclasses.replace(SETTINGS, batch_size=2), only=["transformers assisted"])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="the device is gpu; .* JAX_PLATFORMS=cpu"):
        measure()


def installed(*packages):
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed: there is no such peer to compare with")


def check_equal(entries, names):
    for name in names:
        entry = entries[name]
        assert (entry["equal"], entry["differences"]) == (entry["num_prompts"], []), name
        assert entry["tokens"] == entries[PLAIN]["tokens"] and np.min(entry["seconds"]) > 0


@pytest.mark.filterwarnings("default")
def test_transformers_decodes_the_same_and_assisted_generation_uses_the_draft(monkeypatch):
    installed("torch", "transformers")
    t5 = importlib.import_module("transformers").T5ForConditionalGeneration
    forward, widths = t5.forward, []

    @functools.wraps(forward)
    def counted(self, *args, **kwargs):
        widths.append(self.config.d_model)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(t5, "forward", counted)
    names = [name for name in MODES if name.startswith("transformers ")]
    calls = {}
    for name in names:
        widths.clear()
        document, entries = measure(texts=TEXTS[:2], only=[name])
        check_equal(entries, [name])
        calls[name] = (widths.count(64), widths.count(32))  # target, draft
    assert document["versions"]["transformers"] and document["versions"]["torch"]
    emitted = 2 * sum(entries[PLAIN]["tokens"])  # one decode that is timed, one that is not
    assert calls[names[0]] == calls[names[1]] == (emitted, 0)
    for target, draft in (calls[name] for name in names[2:]):
        assert 0 < target < 0.6 * emitted and draft > 0


@pytest.mark.filterwarnings("default")
def test_ctranslate2_and_batches_decode_the_same():
    installed("torch", "transformers", "ctranslate2")
    names = [
        name for name in MODES if "ctranslate2" in name or name in ("transformers greedy", "transformers static cache")
    ]
    for batch_size in (1, 2):
        document, entries = measure(dataclasses.replace(SETTINGS, batch_size=batch_size), only=names)
        check_equal(entries, names)
    assert document["versions"]["ctranslate2"]


@pytest.mark.filterwarnings("default")
def test_encoder_and_decoder_of_different_depth(tmp_path):
    installed("torch", "transformers", "ctranslate2")
    model = tiny.model(vocab=262, layers=2)  # its encoder has one layer
    paths = [str(tmp_path / name) for name in ("target", "draft")]
    for seed, path in enumerate(paths):
        huggingface.save_checkpoint(path, tiny.params(model, seed, 3.0), model.config, progress=False)
    models = Models(target_checkpoint=paths[0], draft_checkpoint=paths[1], vocabulary="bytes", extra_ids=3)
    names = ["transformers greedy", "transformers static cache", "transformers assisted by gamma", "ctranslate2 greedy"]
    _, entries = measure(models=models, texts=TEXTS[:1], only=names)
    assert sum(entries[PLAIN]["tokens"]) > 9
    check_equal(entries, names)


@pytest.mark.t5x
@pytest.mark.filterwarnings("default")
def test_t5x_decodes_the_same():
    installed("t5x", "seqio")
    with jax.numpy_rank_promotion("allow"):
        _, entries = measure(dataclasses.replace(SETTINGS, batch_size=2), only=["t5x temperature_sample"])
    check_equal(entries, ["t5x temperature_sample"])
