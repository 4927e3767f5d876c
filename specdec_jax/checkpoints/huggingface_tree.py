"""The same parameters by T5X's names and by Hugging Face's.

    encoder/layers_i/attention/query/kernel [emb, joined]   encoder.block.i.layer.0.SelfAttention.q.weight [joined, emb]
    encoder/relpos_bias/rel_embedding [heads, buckets]      encoder.block.0.layer.0.SelfAttention.relative_attention_...
    token_embedder/embedding [vocab, emb]                   shared.weight [vocab, emb]

Every matrix but the embedding is transposed: PyTorch's linear maps are [out, in]. Heads are joined alike.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from specdec_jax.checkpoints.safetensors_format import StoredTensor
from specdec_jax.checkpoints.t5x_index import CheckpointError
from specdec_jax.models.t5_config import T5Config

Shape = tuple[int, ...]

EMBEDDING, LOGITS = "shared.weight", "lm_head.weight"
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_UNUSED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)  # old files have it; no T5 does
_ATTENTIONS = {
    "encoder": (("attention", "pre_attention_layer_norm", "SelfAttention"),),
    "decoder": (
        ("self_attention", "pre_self_attention_layer_norm", "SelfAttention"),
        ("encoder_decoder_attention", "pre_cross_attention_layer_norm", "EncDecAttention"),
    ),
}


class Tensor(NamedTuple):
    """One parameter in Hugging Face's terms.

    Attributes:
      name: its name there.
      shape: its shape in T5X's tree.
      is_transposed: whether it is the other way round there.
    """

    name: str
    shape: Shape
    is_transposed: bool = False

    @property
    def stored_shape(self) -> Shape:
        """Its shape there."""
        return self.shape[::-1] if self.is_transposed else self.shape


def tensors(config: T5Config) -> dict[str, Tensor]:
    """Every parameter of a T5 with one relative position bias per stack, by its name in T5X's plain tree."""
    emb, joined, mlp = config.emb_dim, config.num_heads * config.head_dim, config.mlp_dim
    gated = len(config.mlp_activations) > 1
    wi = [f"wi_{i}" for i in range(len(config.mlp_activations))] if gated else ["wi"]
    found = {"token_embedder/embedding": Tensor(EMBEDDING, (config.vocab_size, emb))}
    for stack, num_layers in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shape = (config.num_heads, config.relpos_num_buckets)
        found[f"{stack}/relpos_bias/rel_embedding"] = Tensor(bias, shape, True)
        found[f"{stack}/{stack}_norm/scale"] = Tensor(f"{stack}.final_layer_norm.weight", (emb,))
        for i in range(num_layers):
            ours, theirs = f"{stack}/layers_{i}", f"{stack}.block.{i}.layer"
            for j, (attention, norm, name) in enumerate(_ATTENTIONS[stack]):
                found[f"{ours}/{norm}/scale"] = Tensor(f"{theirs}.{j}.layer_norm.weight", (emb,))
                for part in ("query", "key", "value", "out"):
                    shape = (joined, emb) if part == "out" else (emb, joined)
                    kernel = Tensor(f"{theirs}.{j}.{name}.{part[0]}.weight", shape, True)
                    found[f"{ours}/{attention}/{part}/kernel"] = kernel
            last = f"{theirs}.{len(_ATTENTIONS[stack])}"
            found[f"{ours}/pre_mlp_layer_norm/scale"] = Tensor(f"{last}.layer_norm.weight", (emb,))
            for part in wi:
                found[f"{ours}/mlp/{part}/kernel"] = Tensor(f"{last}.DenseReluDense.{part}.weight", (emb, mlp), True)
            found[f"{ours}/mlp/wo/kernel"] = Tensor(f"{last}.DenseReluDense.wo.weight", (mlp, emb), True)
    if not config.logits_via_embedding:
        found["decoder/logits_dense/kernel"] = Tensor(LOGITS, (emb, config.vocab_size), True)
    return found


def untie(
    stored: Mapping[str, StoredTensor], config: T5Config, path: str, *, may_tie_logits: bool
) -> dict[str, StoredTensor]:
    """The stored tensors with the embedding under one name, and the logits' weights under theirs if they have any.

    Args:
      stored: what the files hold.
      config: the model.
      path: the checkpoint, for messages.
      may_tie_logits: whether logits that are not scaled may have the embedding for weights.

    Raises:
      CheckpointError: two tensors that have to be the same are not.
    """
    found = {name: tensor for name, tensor in stored.items() if name not in _UNUSED}
    copies = [*_COPIES, LOGITS] if config.logits_via_embedding else _COPIES
    for name in copies:
        copy = found.pop(name, None)
        if copy is None or found.setdefault(EMBEDDING, copy) is copy:
            continue
        if copy.shape != found[EMBEDDING].shape or not np.array_equal(copy.read(), found[EMBEDDING].read()):
            why = "config.json says that logits come from the embedding; correct its tie_word_embeddings"
            if name != LOGITS:
                why = "a T5's encoder and decoder share one embedding"
            raise CheckpointError(f"{path}: tensors {name} and {EMBEDDING} differ, where {why}.")
    if may_tie_logits and not config.logits_via_embedding and EMBEDDING in found:
        found.setdefault(LOGITS, found[EMBEDDING])
    return found


def check_tensors(found: Mapping[str, StoredTensor], wanted: Iterable[Tensor], path: str) -> None:
    """Checks that the stored tensors are those of a model.

    Raises:
      CheckpointError: one is missing, unexpected or of another shape.
    """
    shapes = {tensor.name: tensor.stored_shape for tensor in wanted}
    problems = []
    for kind, names in (("missing", shapes.keys() - found.keys()), ("unexpected", found.keys() - shapes.keys())):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            problems.append(f"{kind} {min(names)}{more}")
    if problems:
        raise CheckpointError(f"{path}: tensors differ from those that config.json implies: {'; '.join(problems)}.")
    for name, shape in shapes.items():
        if found[name].shape != shape:
            raise CheckpointError(
                f"{found[name].file}: tensor {name} has shape {list(found[name].shape)}, where config.json implies "
                f"{list(shape)}."
            )
