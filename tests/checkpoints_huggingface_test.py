"""Tests of Hugging Face checkpoints: what is written is read back, by transformers too, and what is wrong is said."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import mini_pair
import numpy as np
import pytest
import tiny
from t5x_checkpoints import FIXTURES, SCALABLE, assert_same

from specdec_jax import cli, generation
from specdec_jax.checkpoints import huggingface, safetensors_format, t5x, t5x_arrays
from specdec_jax.checkpoints.huggingface import CheckpointError, load_params, read_config, save_checkpoint
from specdec_jax.checkpoints.t5x_tree import flatten, unflatten
from specdec_jax.conversion import convert
from specdec_jax.models.t5 import T5Config

KINDS = {
    "1.1": {},
    "1.0": {"mlp_activations": ("relu",), "logits_via_embedding": True},
    "tied and gated": {"logits_via_embedding": True},
    "other settings": {
        "mlp_activations": ("relu", "linear"),
        "start_id": 3,
        "relpos_num_buckets": 8,
        "relpos_max_distance": 20,
    },
}


def model(kind):
    return tiny.model(vocab=50, layers=2, **KINDS[kind])


def weights(kind):
    return jax.tree.map(np.asarray, tiny.params(model(kind)))


@pytest.fixture(params=["1.1", "1.0"])
def kind(request):
    return request.param


@pytest.fixture
def saved(tmp_path, kind):
    return Path(save_checkpoint(tmp_path / "saved", weights(kind), model(kind).config))


of_1_1 = pytest.mark.parametrize("kind", ["1.1"], indirect=True)
of_1_0 = pytest.mark.parametrize("kind", ["1.0"], indirect=True)


def tensors(directory):
    """Every tensor of a single file."""
    header = safetensors_format.read_header(str(directory / "model.safetensors"))
    return {name: tensor.read() for name, tensor in header.items()}


def rewrite(directory, edit, dtype=None):
    """Writes the tensors anew once `edit` has changed them."""
    arrays = tensors(directory)
    edit(arrays)
    safetensors_format.write_file(str(directory / "model.safetensors"), arrays, dtype, lambda nbytes: None)


def edit_config(directory, file="config.json", **changes):
    """Changes config.json; None removes a key."""
    path = directory / file
    content = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize("name", ["mini_target", "mini_draft"])
@pytest.mark.parametrize("form", ["legacy_f32", "legacy_bf16"])
def test_there_and_back_again(tmp_path, name, form):
    source = FIXTURES / name / form / "checkpoint_1500"
    convert(str(source), str(tmp_path / "there"))
    convert(str(tmp_path / "there"), str(tmp_path / "back"), step=1500)
    assert_same(flatten(t5x.load_params(tmp_path / "back/checkpoint_1500")), flatten(t5x.load_params(source)))
    assert_same(flatten(load_params(tmp_path / "there")), flatten(t5x.load_params(source)))


def test_what_a_t5x_checkpoint_cannot_say_is_refused(tmp_path):
    convert(str(FIXTURES / "mini_target/legacy_f32/checkpoint_1500"), str(tmp_path / "there"))
    edit_config(tmp_path / "there", relative_attention_max_distance=64)
    with pytest.raises(ValueError, match="relpos_max_distance is 64, which a T5X checkpoint cannot say: .* as 128"):
        convert(str(tmp_path / "there"), str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_sizes_come_back(tmp_path, kind):
    directory = save_checkpoint(tmp_path / "deep/saved", weights(kind), model(kind).config, progress=False)
    assert directory == str(tmp_path / "deep/saved")
    assert sorted(os.listdir(directory)) == ["config.json", "generation_config.json", "model.safetensors"]
    assert os.listdir(tmp_path / "deep") == ["saved"]
    assert read_config(directory) == read_config(directory, expected=model(kind).config) == model(kind).config
    found = load_params(directory, expected=model(kind).param_shapes(), progress=False)
    assert_same(flatten(found), flatten(weights(kind)))
    assert all(array.flags.c_contiguous and array.flags.writeable for array in flatten(found).values())


def test_dtypes(tmp_path, kind):
    bfloat16 = {name: array.astype(jnp.bfloat16) for name, array in flatten(weights(kind)).items()}
    config = model(kind).config
    rounded = Path(save_checkpoint(tmp_path / "rounded", weights(kind), config, dtype=jnp.bfloat16))
    on_device = jax.tree.map(jnp.asarray, unflatten(bfloat16))
    same = Path(save_checkpoint(tmp_path / "same", on_device, config))
    assert (rounded / "model.safetensors").read_bytes() == (same / "model.safetensors").read_bytes()
    assert json.loads((same / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_same(flatten(load_params(same)), bfloat16)
    assert_same(
        flatten(load_params(same, dtype="float32")), {n: array.astype(np.float32) for n, array in bfloat16.items()}
    )
    some = {n: bfloat16[n] if n.endswith("kernel") else a for n, a in flatten(weights(kind)).items()}
    mixed = Path(save_checkpoint(tmp_path / "mixed", unflatten(some), config))
    assert json.loads((mixed / "config.json").read_text())["torch_dtype"] == "float32"
    assert_same(flatten(load_params(mixed)), some)
    half = {name: array.astype(np.float16) for name, array in tensors(same).items()}
    rewrite(same, lambda arrays: arrays.update(half))
    assert {a.dtype.name for a in tensors(same).values()} == {"float16"}
    assert {a.dtype.name for a in flatten(load_params(same)).values()} == {"float32"}
    assert {a.dtype.name for a in flatten(load_params(same, dtype=jnp.bfloat16)).values()} == {"bfloat16"}


@of_1_1
def test_shards(tmp_path, kind):
    config = model(kind).config
    directory = Path(save_checkpoint(tmp_path / "sharded", weights(kind), config, max_shard_bytes=1500))
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(directory.glob("*.safetensors"))
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 5
    headers = {file.name: safetensors_format.read_header(str(file)) for file in files}
    sizes = [sum(tensor.nbytes for tensor in header.values()) for header in headers.values()]
    assert all(size <= 1500 or len(header) == 1 for size, header in zip(sizes, headers.values(), strict=True))
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert index["weight_map"] == {name: file for file, header in headers.items() for name in header}
    assert_same(flatten(load_params(directory)), flatten(weights(kind)))
    assert read_config(directory) == config


@of_1_0
def test_the_file_is_as_the_format_wants_it(saved):
    content = (saved / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    offsets = [entry["data_offsets"] for entry in header.values()]
    assert [begin for begin, _ in offsets] == [0, *(end for _, end in offsets[:-1])]
    assert 8 + length + offsets[-1][1] == len(content)
    assert header["shared.weight"]["shape"] == [50, 8] and header["shared.weight"]["dtype"] == "F32"
    assert header["encoder.block.0.layer.1.DenseReluDense.wi.weight"]["shape"] == [16, 8]
    assert header["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]["shape"] == [32, 2]
    assert "lm_head.weight" not in header and "decoder.block.1.layer.2.layer_norm.weight" in header


@of_1_1
def test_what_config_json_says(saved):
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["T5ForConditionalGeneration"] and config["model_type"] == "t5"
    assert (config["vocab_size"], config["d_model"], config["d_kv"], config["d_ff"]) == (50, 8, 4, 16)
    assert (config["num_heads"], config["num_layers"], config["num_decoder_layers"]) == (2, 1, 2)
    assert config["feed_forward_proj"] == "gated-gelu" and config["tie_word_embeddings"] is False
    ids = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    assert json.loads((saved / "generation_config.json").read_text()) == ids == {key: config[key] for key in ids}


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"num_decoder_layers": None}, "num_decoder_layers", 1),
        ({"relative_attention_num_buckets": None}, "relpos_num_buckets", 32),
        ({"relative_attention_max_distance": None}, "relpos_max_distance", 128),
        ({"feed_forward_proj": None}, "mlp_activations", ("relu",)),
        ({"feed_forward_proj": None, "model_type": "mt5"}, "mlp_activations", ("gelu", "linear")),
        ({"dense_act_fn": "gelu_new", "is_gated_act": True}, "mlp_activations", ("gelu", "linear")),
        ({"tie_word_embeddings": None}, "logits_via_embedding", True),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, "logits_via_embedding", False),
        ({"tie_word_embeddings": True, "model_type": "mt5"}, "logits_via_embedding", False),
        ({"decoder_start_token_id": 7}, "start_id", 0),  # generation_config.json says 0
    ],
)
@of_1_1
def test_what_config_json_may_leave_out_or_add(saved, changes, field, value):
    edit_config(saved, **changes)
    assert getattr(read_config(saved), field) == value


@of_1_1
def test_start_token(saved):
    edit_config(saved, decoder_start_token_id=7)
    edit_config(saved, "generation_config.json", decoder_start_token_id=9)
    assert read_config(saved).start_id == 9
    edit_config(saved, "generation_config.json", decoder_start_token_id=None)
    assert read_config(saved).start_id == 7
    os.remove(saved / "generation_config.json")
    assert read_config(saved).start_id == 7


COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def test_embedding_under_other_names(saved, kind):
    def copy(arrays):
        arrays |= {name: arrays["shared.weight"] for name in COPIES}
        # The last one is in the T5 1.0 checkpoints of old; no T5 has it.
        unused = {
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": np.ones((32, 2), np.float32)
        }
        arrays |= unused

    rewrite(saved, copy)
    assert_same(flatten(load_params(saved)), flatten(weights(kind)))
    rewrite(saved, lambda arrays: [arrays.pop(name) for name in ("shared.weight", COPIES[0])])
    assert_same(flatten(load_params(saved)), flatten(weights(kind)))


@of_1_0
def test_logits_of_the_embedding_stored_besides(saved, kind):
    rewrite(saved, lambda arrays: arrays.update({"lm_head.weight": arrays["shared.weight"]}))
    assert_same(flatten(load_params(saved)), flatten(weights(kind)))
    rewrite(saved, lambda arrays: arrays.pop("shared.weight"))
    assert_same(flatten(load_params(saved)), flatten(weights(kind)))


@of_1_1
def test_unscaled_logits_of_the_embedding(saved, kind):
    """As transformers 5 saves a T5 1.1 that was never trained."""
    edit_config(saved, tie_word_embeddings=True, scale_decoder_outputs=False)
    rewrite(saved, lambda arrays: arrays.pop("lm_head.weight"))
    logits = weights(kind)["token_embedder"]["embedding"].T
    assert_same(flatten(load_params(saved)), flatten(weights(kind)) | {"decoder/logits_dense/kernel": logits})


def message(directory, **kwargs):
    """The message of the CheckpointError that reading raises, which has to be one line and name the file."""
    with pytest.raises(CheckpointError) as error:
        load_params(directory, **kwargs)
    text = str(error.value)
    assert "\n" not in text and text.startswith(str(directory)), text
    return text


WRONG_CONFIGS = {
    "another model": ({"model_type": "bart"}, "config.json: model_type is 'bart'; only 't5' and 'mt5' are T5s"),
    "a list": ({"model_type": ["t5"]}, "model_type is ['t5']"),
    "no model": ({"model_type": None}, "model_type is None"),
    "activation": (
        {"feed_forward_proj": "gated-silu"},
        "feed_forward_proj is 'gated-silu'; only 'gated-gelu', 'relu', 'gated-relu' are supported",
    ),
    "other activation": ({"dense_act_fn": "silu"}, "dense_act_fn is 'silu', where feed_forward_proj is 'gated-gelu'"),
    "epsilon": ({"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon is 1e-05; only 1e-06 is supported"),
    "padding": ({"pad_token_id": 1}, "pad_token_id is 1; only 0 is supported"),
    "no size": ({"d_model": None}, "config.json: d_model is None; it must be an integer"),
    "not a number": ({"d_kv": "4"}, "d_kv is '4'; it must be an integer"),
    "truth": ({"num_heads": True}, "num_heads is True; it must be an integer"),
    "zero": ({"d_ff": 0}, "config.json: T5Config.mlp_dim is 0; it must be an integer, 1 or more"),
    "buckets": ({"relative_attention_num_buckets": 2}, "config.json: T5Config.relpos_num_buckets is 2"),
    "fewer layers": (
        {"num_decoder_layers": 1},
        "tensors differ from those that config.json implies: unexpected "
        "decoder.block.1.layer.0.SelfAttention.k.weight and 13 more",
    ),
    "more layers": (
        {"num_layers": 2},
        "implies: missing encoder.block.1.layer.0.SelfAttention.k.weight and 8 more",
    ),
    "plain": (
        {"feed_forward_proj": "relu"},
        "implies: missing decoder.block.0.layer.2.DenseReluDense.wi.weight and 2 more; unexpected "
        "decoder.block.0.layer.2.DenseReluDense.wi_0.weight and 5 more",
    ),
    "shape": (
        {"vocab_size": 49},
        "model.safetensors: tensor shared.weight has shape [50, 8], where config.json implies [49, 8]",
    ),
    "transposed shape": ({"d_ff": 17}, "has shape [16, 8], where config.json implies [17, 8]"),
    "scaled": (
        {"tie_word_embeddings": True},
        "tensors lm_head.weight and shared.weight differ, where config.json says that logits come from the embedding; "
        "correct its tie_word_embeddings",
    ),
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
@of_1_1
def test_wrong_config(saved, name):
    changes, wanted = WRONG_CONFIGS[name]
    edit_config(saved, **changes)
    assert wanted in message(saved)


@of_1_1
def test_wrong_json(saved):
    (saved / "generation_config.json").write_text("{")
    assert "generation_config.json: this is not JSON: " in message(saved)
    for text, wanted in (("{", "config.json: this is not JSON: "), ("[]", "config.json: holds no JSON object")):
        (saved / "config.json").write_text(text)
        assert wanted in message(saved)
    (saved / "config.json").write_bytes(b"\xff")
    assert "config.json: this is not JSON: " in message(saved)
    os.remove(saved / "config.json")
    assert message(saved).endswith("there is no config.json here; pass the directory of a Hugging Face checkpoint.")
    assert huggingface.is_checkpoint(saved)


def test_wrong_places(tmp_path):
    name = tmp_path / "google/flan-t5-small"
    hint = "download a model of the Hugging Face Hub first: hf download NAME --local-dir DIRECTORY."
    assert message(name) == f"{name}: no such directory; {hint}"
    assert message("gs://b/x") == (
        "gs://b/x: Hugging Face checkpoints are not read from a bucket; copy it to a directory."
    )
    assert "no config.json" in message(tmp_path)
    assert not any(huggingface.is_checkpoint(path) for path in (name, "gs://b/x", tmp_path, mini_pair.TARGET))


@of_1_1
def test_no_weights(saved):
    os.remove(saved / "model.safetensors")
    assert message(saved).endswith("neither model.safetensors nor model.safetensors.index.json is here.")
    (saved / "pytorch_model.bin").touch()
    assert message(saved).endswith("save it as safetensors: model.save_pretrained(dir, safe_serialization=True).")


def header(**entry):
    text = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


DAMAGED = {
    "empty": (b"", "this is no safetensors file, or is cut off; download or save it again"),
    "short": (header()[:20], "this is no safetensors file, or is cut off"),
    "no safetensors": (b"PK\x03\x04 pytorch's format" * 9, "this is no safetensors file, or is cut off"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "this is a Git LFS pointer to the file, not the file"),
    "cut off": (header()[:-1], f"has {len(header()) - 1} bytes, where its header says {len(header())}; it is cut off"),
    "too long": (header() + b"x", f"has {len(header()) + 1} bytes, where its header says {len(header())}"),
    "no JSON": ((2).to_bytes(8, "little") + b"{x", "its safetensors header is damaged (JSONDecodeError: "),
    "a list": ((2).to_bytes(8, "little") + b"[]", "its safetensors header is damaged (TypeError: "),
    "no entry": ((7).to_bytes(8, "little") + b'{"x":1}', "its safetensors header is damaged (TypeError: "),
    "no shape": ((21).to_bytes(8, "little") + b'{"x":{"dtype":"F32"}}', "header is damaged (KeyError: 'data_offsets')"),
    "offsets": (header(data_offsets=[0, 4]), "header is damaged (ValueError: tensor x of shape [2] at [0, 4])"),
    "negative": (header(data_offsets=[-8, 0]), "header is damaged (ValueError: tensor x of shape [2] at [-8, 0])"),
    "fraction": (header(shape=[2.0]), "header is damaged"),
    "integers": (header(dtype="I64"), "tensor x is I64; only F32, BF16, F16, F64 are read: save the model in float32"),
    "eight bits": (header(dtype="F8_E4M3"), "tensor x is F8_E4M3; only"),
}


@pytest.mark.parametrize("name", DAMAGED)
@of_1_1
def test_damaged_file(saved, name):
    content, wanted = DAMAGED[name]
    (saved / "model.safetensors").write_bytes(content)
    assert message(saved).startswith(f"{saved}/model.safetensors: ") and wanted in message(saved)


@of_1_1
def test_cut_off_anywhere(saved):
    content = (saved / "model.safetensors").read_bytes()
    for length in range(0, len(content), 401):
        (saved / "model.safetensors").write_bytes(content[:length])
        message(saved)


@of_1_1
def test_wrong_tensors(saved):
    content = (saved / "model.safetensors").read_bytes()
    for edit, wanted in (
        (lambda arrays: arrays.pop("encoder.final_layer_norm.weight"), "missing encoder.final_layer_norm.weight."),
        (lambda arrays: arrays.pop("shared.weight"), "implies: missing shared.weight."),
        (lambda arrays: arrays.pop("lm_head.weight"), "implies: missing lm_head.weight."),
        (lambda arrays: arrays.update({"bias": np.ones(3, np.float32)}), "implies: unexpected bias."),
        (
            lambda arrays: arrays.update({COPIES[1]: arrays["shared.weight"] + 1}),
            "embed_tokens.weight and shared.weight differ, where a T5's encoder and decoder share one embedding",
        ),
        (lambda arrays: arrays.update({COPIES[1]: arrays["shared.weight"][1:]}), "and shared.weight differ"),
    ):
        (saved / "model.safetensors").write_bytes(content)
        rewrite(saved, edit)
        assert wanted in message(saved)


@of_1_1
def test_wrong_shards(tmp_path, kind):
    directory = Path(save_checkpoint(tmp_path / "x", weights(kind), model(kind).config, max_shard_bytes=1500))
    index = directory / "model.safetensors.index.json"
    content = index.read_text()
    places = json.loads(content)["weight_map"]
    first = sorted(set(places.values()))[0]
    index.write_text(json.dumps({"weight_map": places | {"shared.weight": first}}))
    assert f"{first}: has no tensor shared.weight, which model.safetensors.index.json says is there" in message(
        directory
    )
    for damaged in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"shared.weight": 3}}'):
        index.write_text(damaged)
        assert "model.safetensors.index.json: the index is damaged (" in message(directory)
    index.write_text(content)
    os.remove(directory / first)
    assert f"{first}: this shard, which model.safetensors.index.json names, is missing; download" in message(directory)


@of_1_1
def test_not_what_is_expected(saved):
    with pytest.raises(ValueError, match="dtype is int8; parameters are read as float32 or bfloat16"):
        load_params(saved, dtype=jnp.int8)
    text = message(saved, expected=model("1.0").param_shapes())
    assert "this is a T5 1.1 tree" in text and "where a T5 1.0 tree" in text
    assert "parameter decoder/decoder_norm/scale has shape [8], where [12] is expected" in message(
        saved, expected=tiny.model(vocab=50, layers=2, emb=12).param_shapes()
    )
    with pytest.raises(CheckpointError, match=r"saved: config.json says that start_id is 0, where 3 is expected"):
        read_config(saved, expected=tiny.model(vocab=50, layers=2, start_id=3).config)
    other = tiny.model(vocab=50, layers=2, dtype=jnp.bfloat16).config  # of activations: no matter of checkpoints
    assert read_config(saved, expected=other) == model("1.1").config


def refusal(tmp_path, *args, **kwargs):
    """The message of what `save_checkpoint` raises, which has to leave nothing behind."""
    before = os.listdir(tmp_path)
    with pytest.raises(ValueError) as error:
        save_checkpoint(tmp_path / "new", *args, **kwargs)
    assert os.listdir(tmp_path) == before
    return str(error.value)


def test_what_is_not_written(tmp_path):
    params, config = weights("1.1"), model("1.1").config
    assert "dtype is float16; parameters are written as float32 or bfloat16" in refusal(
        tmp_path, params, config, dtype=jnp.float16
    )
    assert "max_shard_bytes is 0; it must be 1 or more" in refusal(tmp_path, params, config, max_shard_bytes=0)
    assert "eos_id is 50; it must be an id of the vocabulary, 0 to 49" in refusal(tmp_path, params, config, eos_id=50)
    assert "this is a T5 1.1 tree" in refusal(tmp_path, params, model("1.0").config)
    assert "missing decoder/layers_2/" in refusal(tmp_path, params, tiny.model(vocab=50, layers=3).config)
    assert "has shape [50, 8], where [50, 12] is expected" in refusal(tmp_path, params, tiny.model(50, 12, 2).config)
    assert "parameter decoder/decoder_norm/scale is float16; only float32 and bfloat16 are written" in refusal(
        tmp_path, jax.tree.map(lambda leaf: leaf.astype(np.float16), params), config
    )
    plain = tiny.model(vocab=50, layers=2, mlp_activations=("gelu",))
    assert "T5Config.mlp_activations is ('gelu',); Hugging Face's T5 has only ('gelu', 'linear'), ('relu',)" in refusal(
        tmp_path, tiny.params(plain), plain.config
    )
    with pytest.raises(CheckpointError, match=r"gs://b/x: writing to a bucket is not supported"):
        save_checkpoint("gs://b/x", params, config)


def test_a_bias_per_layer_is_not_written(tmp_path):
    params = t5x.load_params(SCALABLE)
    assert "relative position bias per layer (scalable_t5; relpos_per_layer=True), which Hugging Face's T5" in refusal(
        tmp_path, params, T5Config.from_params(params)
    )


@of_1_1
def test_existing_directory_is_not_overwritten(saved, kind):
    before = (saved / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"saved: already exists; remove it or choose another directory"):
        save_checkpoint(saved, weights(kind), model(kind).config)
    assert (saved / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_failed_write_leaves_nothing_behind(tmp_path, monkeypatch, error):
    write_file, calls = safetensors_format.write_file, []

    def fail(*args):
        calls.append(args)
        if len(calls) == 3:
            assert [name.startswith("new.tmp-") for name in os.listdir(tmp_path)] == [True]
            assert len(list(tmp_path.glob("new.tmp-*/*.safetensors"))) == 2
            raise error("disk full")
        write_file(*args)

    monkeypatch.setattr(safetensors_format, "write_file", fail)
    with pytest.raises(error, match="disk full"):
        save_checkpoint(tmp_path / "new", weights("1.1"), model("1.1").config, max_shard_bytes=1500)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("seconds", "progress", "is_shown"), [(-1, True, True), (60, True, False), (-1, False, False)])
def test_progress_goes_to_stderr(tmp_path, monkeypatch, capsys, seconds, progress, is_shown):
    monkeypatch.setattr(t5x_arrays, "_SECONDS_WITHOUT_BAR", seconds)
    save_checkpoint(tmp_path / "new", weights("1.1"), model("1.1").config, progress=progress)
    load_params(tmp_path / "new", progress=progress)
    output = capsys.readouterr()
    assert output.out == ""
    assert ("Writing new" in output.err) == ("Reading new" in output.err) == is_shown


@of_1_0
def test_read_model(saved, kind):
    found, params = generation.read_model(str(saved), dtype="bfloat16")
    assert found.config == T5Config(**{**vars(model(kind).config), "dtype": jnp.bfloat16})
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    found, params = generation.read_model(str(saved), model(kind).config)
    assert found == model(kind)
    assert_same(flatten(params), flatten(weights(kind)))
    with pytest.raises(ValueError, match=r"saved: config.json says that vocab_size is 50, where 6 is expected"):
        generation.read_model(str(saved), tiny.model(**KINDS[kind]).config)
    os.remove(saved / "config.json")
    with pytest.raises(ValueError, match=r"saved: there is no config.json here"):
        generation.read_model(str(saved))


@pytest.fixture
def transformers():
    pytest.importorskip("torch", reason="torch is not installed: transformers cannot read what is written")
    return pytest.importorskip("transformers", reason="transformers is not installed: nobody reads what is written")


def their_logits(theirs, encoder_tokens, decoder_tokens):
    import torch

    with torch.no_grad():
        return theirs.eval()(
            input_ids=torch.from_numpy(encoder_tokens).long(),
            attention_mask=torch.from_numpy(encoder_tokens > 0),
            decoder_input_ids=torch.from_numpy(decoder_tokens).long(),
        ).logits.numpy()


def random_weights(kind):
    """Nothing is symmetric, zero or one, so that a wrong place or a missing transposition shows."""
    rng = np.random.default_rng(0)

    def weight(path, shape):
        std = 0.2 if path[-1].key == "scale" else 1.0 if "emb" in path[-1].key else shape.shape[0] ** -0.5
        return rng.normal(float(path[-1].key == "scale"), std, shape.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(weight, model(kind).param_shapes())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 2000])
def test_transformers_reads_what_is_written(tmp_path, transformers, kind, max_shard_bytes):
    ours, params = model(kind), random_weights(kind)
    directory = save_checkpoint(tmp_path / "ours", params, ours.config, max_shard_bytes=max_shard_bytes)
    theirs, found = transformers.T5ForConditionalGeneration.from_pretrained(directory, output_loading_info=True)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    rng = np.random.default_rng(1)
    encoder_tokens, decoder_tokens = rng.integers(1, 50, (2, 2, 40), dtype=np.int32)
    encoder_tokens[1, 20:] = 0
    decoder_tokens[:, 0] = ours.config.start_id
    expected = jax.jit(ours.forward)(params, encoder_tokens, decoder_tokens)
    assert np.std(expected) > 0.1  # or the tolerance would say nothing
    np.testing.assert_allclose(
        their_logits(theirs, encoder_tokens, decoder_tokens), np.asarray(expected), rtol=0, atol=1e-4
    )
    settings = theirs.generation_config
    ids = (settings.decoder_start_token_id, settings.eos_token_id, settings.pad_token_id)
    assert ids == (ours.config.start_id, 1, 0)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="2KB" if max_shard_bytes == 2000 else "5GB")
    assert (tmp_path / "theirs/model.safetensors").exists() == (max_shard_bytes != 2000)
    assert_same(flatten(load_params(tmp_path / "theirs")), flatten(params))
    assert read_config(tmp_path / "theirs") == ours.config


def test_transformers_reads_bfloat16(tmp_path, transformers, kind):
    import torch

    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_weights(kind))
    directory = save_checkpoint(tmp_path / "ours", params, model(kind).config)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(directory, torch_dtype="auto")
    assert {weight.dtype for weight in theirs.parameters()} == {torch.bfloat16}
    theirs.save_pretrained(tmp_path / "theirs")
    assert_same(flatten(load_params(tmp_path / "theirs")), flatten(params))


def test_mt5_of_transformers(tmp_path, transformers):
    ours, params = model("1.1"), random_weights("1.1")
    directory = save_checkpoint(tmp_path / "ours", params, ours.config)
    edit_config(Path(directory), model_type="mt5")
    theirs = transformers.MT5ForConditionalGeneration.from_pretrained(directory)
    theirs.save_pretrained(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs/config.json").read_text())["model_type"] == "mt5"
    assert_same(flatten(load_params(tmp_path / "theirs")), flatten(params))
    assert read_config(tmp_path / "theirs") == ours.config


@pytest.fixture
def specdec(capsys, monkeypatch, tmp_path):
    """Runs `specdec` in an empty directory: (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = cli.main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_converted_models_decode_alike(specdec, tmp_path):
    status, out, err = specdec("convert", mini_pair.TARGET, "target")
    assert (status, err) == (0, "")
    assert out.startswith("wrote 345,408 parameters of /") and out.endswith(
        f" in float32 as a Hugging Face checkpoint: {tmp_path}/target\n"
    )
    assert specdec("convert", mini_pair.DRAFT, "draft", "--to=huggingface")[0] == 0
    status, out, _ = specdec("convert", "draft", "back", "--dtype=bfloat16", "--step=3")
    assert out.endswith(f" of draft in bfloat16 as a T5X checkpoint: {tmp_path}/back/checkpoint_3\n")
    options = ["--gin_file=gin/generate.gin", "--gin.VOCABULARY='bytes'", "--gin.BATCH_SIZE=4"]
    options += ["--gin.MAX_DECODE_LENGTH=32", "--gin.MAX_INPUT_LENGTH=32", "--gin.TARGET_CHECKPOINT='target'"]
    outputs = [e["prediction"] for e in mini_pair.greedy_outputs()]
    inputs = [e["inputs"]["inputs_pretokenized"] for e in mini_pair.greedy_outputs()]
    for draft in ("draft", "back/checkpoint_3"):
        status, out, _ = specdec("generate", *options, f"--gin.DRAFT_CHECKPOINT='{draft}'", *inputs)
        assert (status, out.splitlines()) == (0, outputs)


def test_convert_from_one_form_to_the_same(specdec, tmp_path):
    assert specdec("convert", "demo:draft_small", "small")[0] == 0
    assert specdec("convert", "small", "again", "--to=huggingface", "--dtype=bfloat16")[0] == 0
    found = flatten(load_params(tmp_path / "small", dtype=jnp.bfloat16))
    assert_same(flatten(load_params(tmp_path / "again")), found)
    assert specdec("convert", "demo:draft_small", "t5x", "--to=t5x", "--dtype=bfloat16")[0] == 0
    assert_same(flatten(t5x.load_params(tmp_path / "t5x/checkpoint_0")), found)


def test_convert_s_mistakes(specdec, tmp_path):
    (tmp_path / "new/checkpoint_4").mkdir(parents=True)
    for arguments, wanted in (
        (["demo:target"], "the following arguments are required: destination (see specdec convert --help)"),
        (["demo:target", "x", "--to=torch"], "argument --to: invalid choice: 'torch'"),
        (["demo:target", "x", "--dtype=float16"], "argument --dtype: invalid choice: 'float16'"),
        (["demo:target", "x", "--step=3"], "step is 3; only a T5X checkpoint has a step"),
        (["demo:target", "x", "--to=t5x", "--step=-3"], "step is -3; it must be 0 or more"),
        (["demo:nothing", "x"], "'demo:nothing' is not in "),
        (["nowhere", "x"], "nowhere: no such directory"),
        (["demo:target", "new"], "/new: already exists; remove it or choose another destination"),
        (["demo:target", "new", "--to=t5x", "--step=4"], "/new/checkpoint_4: already exists; remove it or choose"),
        (["demo:target", "gs://b/x"], "gs://b/x: a bucket cannot be written to; write to a local directory"),
        ([str(SCALABLE), "x"], "the model has a relative position bias per layer"),
    ):
        status, out, err = specdec("convert", *arguments)
        assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
        assert wanted in err
    assert os.listdir(tmp_path) == ["new"] and os.listdir(tmp_path / "new") == ["checkpoint_4"]
    for changes, wanted in (
        ({"to": "torch"}, "to is 'torch'; it must be"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
    ):
        with pytest.raises(ValueError, match=wanted):
            convert("demo:target", "x", **changes)
