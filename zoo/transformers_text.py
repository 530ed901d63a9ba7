"""Tiny models of transformers that read text and classify it, or write it from both sides."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from zoo.losses import VOCABULARY, classes, masked, spans, texts, to_text, tokens
from zoo.specimen import Specimen

__all__ = ["specimens", "transformer"]

_NO_CHANCE = (
    "residual_dropout hidden_dropout_prob attention_probs_dropout_prob attention_dropout hidden_dropout resid_pdrop embd_pdrop "
    "attn_pdrop dropout activation_dropout"
).split()

_BOTH: dict[str, Any] = dict(vocab_size=VOCABULARY, num_hidden_layers=2, intermediate_size=24, max_position_embeddings=32)
ENCODER: dict[str, Any] = dict(_BOTH, hidden_size=16, num_attention_heads=2, pad_token_id=1)

_DEBERTA = dict(relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=8, position_buckets=4)
_DEBERTA |= dict(type_vocab_size=0, pooler_hidden_size=16)

# What each classifier needs beside ENCODER.
_CLASSIFIERS: dict[str, dict[str, Any]] = {
    **{key: {} for key in "Bert Roberta Ernie MPNet XLMRoberta Camembert RoFormer ConvBert MegatronBert Yoso".split()},
    **{key: {} for key in "FNet IBert Data2VecText LayoutLM Mra EuroBert NomicBert JinaEmbeddingsV3".split()},
    "Electra": dict(embedding_size=8),
    "Nystromformer": dict(num_landmarks=6, segment_means_seq_len=6, conv_kernel_size=3),
    "Luke": dict(entity_vocab_size=20, entity_emb_size=8),
    "RemBert": dict(input_embedding_size=8, output_embedding_size=8),
    "SqueezeBert": dict(embedding_size=16, q_groups=2, k_groups=2, v_groups=2, intermediate_groups=2, output_groups=2),
    "MobileBert": dict(embedding_size=8, intra_bottleneck_size=8, num_feedforward_networks=2),
    "BigBird": dict(attention_type="original_full"),
    "Longformer": dict(attention_window=4),
    "DebertaV2": _DEBERTA,
    "Deberta": _DEBERTA,
    "ModernBert": dict(bos_token_id=0, eos_token_id=2, cls_token_id=0, sep_token_id=2, attn_implementation="sdpa"),
    "Albert": dict(embedding_size=8, num_hidden_groups=1, inner_group_num=1),
}

# Those with words of their own for the same sizes.
_OTHERS: dict[str, dict[str, Any]] = {
    "Funnel": dict(vocab_size=VOCABULARY, d_model=16, n_head=2, d_head=8, d_inner=24, block_sizes=[1, 1], num_decoder_layers=1),
    "Canine": dict(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, num_hash_functions=2,
        num_hash_buckets=16, downsampling_rate=2, local_transformer_stride=4, upsampling_kernel_size=2,
    ),
    "DistilBert": dict(
        vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=32, pad_token_id=1
    ),
    "XLNet": dict(vocab_size=VOCABULARY, d_model=16, n_layer=2, n_head=2, d_inner=24, pad_token_id=1),
    "Reformer": dict(
        vocab_size=VOCABULARY, hidden_size=16, attention_head_size=8, num_attention_heads=2, feed_forward_size=24,
        attn_layers=["local", "lsh"], axial_pos_embds=False, local_attn_chunk_length=2, lsh_attn_chunk_length=2, num_hashes=1,
        num_buckets=2, is_decoder=False, max_position_embeddings=32, pad_token_id=1, hash_seed=0,
    ),
}  # fmt: skip

_T5: dict[str, Any] = dict(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, use_cache=False)
_T5 |= dict(dropout_rate=0.0)
_SIDES = dict(encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24, encoder_layerdrop=0.0)
_SIDES |= dict(decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=24, decoder_layerdrop=0.0)
_BART: dict[str, Any] = dict(vocab_size=VOCABULARY, d_model=16, max_position_embeddings=32, use_cache=False, pad_token_id=1)
_BART |= _SIDES

_WRITERS: dict[str, dict[str, Any]] = {
    "T5": _T5,
    "MT5": _T5,
    "UMT5": _T5,
    "LongT5": dict(_T5, local_radius=2, encoder_attention_type="local"),
    **dict.fromkeys("Bart MBart Pegasus Blenderbot BlenderbotSmall PLBart M2M100".split(), _BART),
    "Marian": dict(_BART, decoder_start_token_id=0),
    "BigBirdPegasus": dict(_BART, attention_type="original_full"),
    "LED": dict(_BART, attention_window=4, max_encoder_position_embeddings=32, max_decoder_position_embeddings=32),
    "ProphetNet": dict(
        vocab_size=VOCABULARY, hidden_size=16, encoder_ffn_dim=24, decoder_ffn_dim=24, num_encoder_layers=1, num_decoder_layers=1,
        num_encoder_attention_heads=2, num_decoder_attention_heads=2, max_position_embeddings=32, ngram=2, use_cache=False,
    ),
    "FSMT": dict(
        {k: v for k, v in _BART.items() if k != "vocab_size"}, langs=["a", "b"], src_vocab_size=VOCABULARY,
        tgt_vocab_size=VOCABULARY,
    ),
    "SwitchTransformers": dict(
        _T5, num_decoder_layers=2, num_experts=3, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, router_jitter_noise=0.0
    ),
    "NllbMoe": dict(
        {k: v for k, v in _BART.items() if k not in ("max_position_embeddings", "pad_token_id")}, num_experts=3,
        encoder_sparse_step=2, decoder_sparse_step=2, router_jitter_noise=0.0, expert_capacity=64,
    ),
}  # fmt: skip


def transformer(config: str, model: str, options: dict[str, Any]) -> nn.Module:
    """A fresh model of transformers, without dropout."""
    settings = {**dict.fromkeys(_NO_CHANCE, 0.0), **options}
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**settings))


def specimens() -> Iterator[Specimen]:
    """Classifiers, BERT's other heads, encoder-decoders."""
    for name, extra in _CLASSIFIERS.items():
        yield _specimen(name, name, f"{name}ForSequenceClassification", ENCODER | extra, classes)
    for name, options in _OTHERS.items():
        yield _specimen(name, name, f"{name}ForSequenceClassification", options, classes)
    yield _specimen("Splinter", "Splinter", "SplinterForQuestionAnswering", ENCODER, spans)
    heads = {"MaskedLM": masked, "TokenClassification": tokens, "QuestionAnswering": spans}
    for head, loss in heads.items():
        yield _specimen(f"Bert {head}", "Bert", f"BertFor{head}", ENCODER, loss)
    own = partial(transformer, "RobertaConfig", "RobertaForSequenceClassification", ENCODER)
    yield Specimen("transformers/Roberta, its own loss", own, texts, lambda model, batch: model(**batch).loss)
    for name, options in _WRITERS.items():
        head = "MTModel" if name == "Marian" else "ForConditionalGeneration"
        yield _specimen(name, name, name + head, options, to_text)


def _specimen(title: str, name: str, model: str, options: dict[str, Any], loss: Any) -> Specimen:
    return Specimen(f"transformers/{title}", partial(transformer, f"{name}Config", model, options), texts, loss)
