"""BERT as the encoder of lines of Larimar and MemReasoner.

Reference: Hugging Face transformers 5.

Shape suffixes: V pieces of BERT's vocabulary, P positions, K sentence types, N tokens of our model, D width.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lit_memory.hf.names import block_names, convert
from lit_memory.hf.reading import check_dims, check_names, errors_from, read_config, read_weights
from lit_memory.text.tokenizers import pretrained_tokenizer
from lit_memory.util.checks import FieldError

OUTER = {
    "norm.weight": "embeddings.LayerNorm.weight",
    "norm.bias": "embeddings.LayerNorm.bias",
    "pooler.weight": "pooler.dense.weight",
    "pooler.bias": "pooler.dense.bias",
}
"""Our weights outside the layers -> Hugging Face's."""
TABLES = (
    "embeddings.word_embeddings.weight",
    "embeddings.position_embeddings.weight",
    "embeddings.token_type_embeddings.weight",
)
SIZES = {
    "encoder_layers": "num_hidden_layers",
    "encoder_width": "hidden_size",
    "encoder_heads": "num_attention_heads",
}
"""Our config fields -> Hugging Face's."""


def read_bert(folder: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Config fields of a model whose encoder has the sizes of the Hugging Face BERT in ``folder``, and its weights.

    BERT is as published: with its pooler, and with or without the heads of its pre-training. Raises ValueError for
    another model, for a BERT with another activation than GELU, and for sizes that the weights do not have.
    """
    with errors_from(folder):
        config = read_config(folder, ("bert",))
        if config.hidden_act != "gelu":
            raise FieldError("hidden_act", config.hidden_act, "expected 'gelu'; the encoder here computes nothing else")
        weights, layers = _published_weights(folder), config.num_hidden_layers
        needed = {*TABLES, *(name for theirs in _names(weights, layers).values() for name in theirs)}
        check_names(weights, needed, f"of a BERT with {layers} layers: check num_hidden_layers")
        for name in TABLES:
            if check_dims(weights, name, 2)[1] != config.hidden_size:
                raise ValueError(
                    f"{name} has shape {tuple(weights[name].shape)}: "
                    f"expected rows of {config.hidden_size} as in the model; check hidden_size"
                )
        return {ours: getattr(config, theirs) for ours, theirs in SIZES.items()}, weights


def _names(weights: Mapping[str, Tensor], layers: int) -> dict[str, list[str]]:
    """Weights of our encoder, but for its tables, -> Hugging Face's."""
    names = {ours: [theirs] for ours, theirs in OUTER.items()}
    for i in range(layers):
        block = block_names("bert", weights, f"encoder.layer.{i}.")
        names |= {f"layers.{i}.{ours}": theirs for ours, theirs in block.items()}
    return names


def token_pieces(folder: Path, bert: Path, vocab_size: int) -> tuple[list[list[int]], int]:
    """The pieces into which BERT's tokenizer splits each token of a decoder, and the id of [CLS].

    folder, bert: have the tokenizers. vocab_size: rows of the decoder's table, which may be more than there are tokens.
    A token without a piece gets BERT's unknown one.
    """
    ours, theirs = pretrained_tokenizer(str(folder)), pretrained_tokenizer(str(bert))
    if None in (theirs.unk_token_id, theirs.cls_token_id):
        raise ValueError(f"{bert}: a tokenizer without [UNK] or [CLS]; expected that of a BERT")
    ids = [[i] for i in range(min(vocab_size, len(ours)))]
    texts = ours.batch_decode(ids, clean_up_tokenization_spaces=False)
    pieces = theirs(texts, add_special_tokens=False).input_ids + [[]] * (vocab_size - len(texts))
    return [found or [theirs.unk_token_id] for found in pieces], theirs.cls_token_id


def bert_weights(
    own: Mapping[str, Tensor], weights: Mapping[str, Tensor], pieces: Sequence[Sequence[int]], cls_id: int
) -> dict[str, Tensor]:
    """Weights for an ``Encoder`` of lines, from those of ``read_bert``, whose sizes it has.

    own: the encoder's weights, of which ``to_latent`` is kept, and positions beyond BERT's.
    pieces: for every token of our model, the ids of its pieces in BERT (``token_pieces``). The token's embedding is the
        mean of theirs, as the lines that we read have one tokenizer, the decoder's.
    cls_id: the token of which ``Encoder.cls`` is the embedding.
    Sentence types are folded into the positions, all being of the first type. Raises ValueError for the tokenizer of
    other weights.
    """
    layers = sum(name.endswith("attention.qkv.weight") for name in own)
    state = dict(own)
    for ours, theirs in _names(weights, layers).items():
        state[ours] = convert([weights[name] for name in theirs], ours, "bert", 0)
    return state | _embeddings(own, weights, pieces, cls_id)


def _published_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder without those of pre-training heads, by their present names: older files have a prefix
    and TensorFlow's names of norms."""
    weights = {}
    for name, tensor in read_weights(folder).items():
        name = name.removeprefix("bert.")
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if not name.startswith("cls.") and not name.endswith("position_ids"):
            weights[name] = tensor
    return weights


def _embeddings(
    own: Mapping[str, Tensor], weights: Mapping[str, Tensor], pieces: Sequence[Sequence[int]], cls_id: int
) -> dict[str, Tensor]:
    """The encoder's token, position and [CLS] embeddings; see ``bert_weights``."""
    words_VD, positions_PD, types_KD = (weights[name] for name in TABLES)
    flat = [i for ids in pieces for i in ids]
    if (most := max(cls_id, *flat)) >= len(words_VD):
        raise ValueError(
            f"{TABLES[0]} has {len(words_VD)} rows, and the tokenizer an id {most}; "
            "expected the tokenizer of these weights"
        )
    counts_N = torch.tensor([len(ids) for ids in pieces])
    token_of_piece = torch.arange(len(pieces)).repeat_interleave(counts_N)
    sums_ND = words_VD.new_zeros(own["tokens.weight"].shape).index_add(0, token_of_piece, words_VD[torch.tensor(flat)])
    own_PD = own["positions.weight"]
    table_PD = torch.cat([positions_PD + types_KD[0], own_PD[len(positions_PD) :]])
    return {
        "cls": words_VD[cls_id],
        "tokens.weight": sums_ND / counts_N.unsqueeze(1),
        "positions.weight": table_PD[: len(own_PD)],
    }
