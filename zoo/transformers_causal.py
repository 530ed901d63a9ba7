"""Tiny models of transformers that continue a text: GPTs, Llamas, mixtures of experts, state spaces."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from zoo.losses import VOCABULARY, causal, texts
from zoo.specimen import Specimen
from zoo.transformers_text import ENCODER, transformer

__all__ = ["specimens"]

_GPT: dict[str, Any] = dict(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, use_cache=False)
_LLAMA: dict[str, Any] = dict(ENCODER, num_key_value_heads=1, head_dim=8, use_cache=False)
_GEMMA = dict(_LLAMA, query_pre_attn_scalar=8, sliding_window=4)


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in names}


_DENSE: dict[str, dict[str, Any]] = {
    "GPT2LMHead": _GPT,
    "OpenAIGPTLMHead": _without(_GPT, "use_cache"),
    "GPTNeo": dict(
        vocab_size=VOCABULARY, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=32, use_cache=False, window_size=4,
    ),
    "GPTNeoX": dict(ENCODER, use_cache=False),
    "GPTJ": dict(_GPT, rotary_dim=4),
    "CodeGen": dict(_GPT, n_head=4, rotary_dim=4),
    "GPTBigCode": _GPT,
    "OPT": dict(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, max_position_embeddings=32,
        word_embed_proj_dim=16, use_cache=False, layerdrop=0.0,
    ),
    "Bloom": dict(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2, use_cache=False),
    "Falcon": dict(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, use_cache=False),
    "Mpt": dict(vocab_size=VOCABULARY, d_model=16, n_heads=2, n_layers=2, max_seq_len=32, expansion_ratio=2, use_cache=False),
    **dict.fromkeys("Llama Mistral Qwen2 Qwen3 Starcoder2 Olmo Olmo2 Cohere Granite Glm Glm4 Nemotron SmolLM3".split(), _LLAMA),
    **dict.fromkeys("Ernie4_5 Exaone4 Helium BitNet Apertus HunYuanDenseV1 SeedOss Arcee Lfm2 Ministral".split(), _LLAMA),
    "DiffLlama": dict(_LLAMA, num_key_value_heads=2),
    "Gemma": _GEMMA,
    "Gemma2": _GEMMA,
    "Gemma3": _GEMMA,
    "Phi": dict(_LLAMA, partial_rotary_factor=0.5, num_key_value_heads=2),
    "Phi3": dict(_without(_LLAMA, "head_dim"), partial_rotary_factor=1.0),
    "Persimmon": dict(_LLAMA, partial_rotary_factor=0.5),
    "StableLm": dict(_LLAMA, partial_rotary_factor=0.5),
}  # fmt: skip

_EXPERTS: dict[str, Any] = dict(
    _LLAMA, experts_implementation="eager", num_local_experts=3, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8,
    n_routed_experts=3, n_shared_experts=1, decoder_sparse_step=1, shared_expert_intermediate_size=8, first_k_dense_replace=0,
    n_group=1, topk_group=1, mlp_only_layers=[],
)  # fmt: skip
_LATENT = dict(
    _without(_EXPERTS, "head_dim"), q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    num_key_value_heads=2,
)  # fmt: skip

_MIXTURES: dict[str, dict[str, Any]] = {
    **dict.fromkeys("Mixtral Qwen2Moe Qwen3Moe Olmoe GraniteMoe GptOss Ernie4_5_Moe Glm4Moe".split(), _EXPERTS),
    "Phimoe": dict(_EXPERTS, router_jitter_noise=0.0),  # else it draws its experts while it trains, for one example alone others
    "DeepseekV2": _LATENT,
    "DeepseekV3": _LATENT,
    "Jamba": dict(
        _without(_EXPERTS, "head_dim"), attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        use_mamba_kernels=False, mamba_d_state=4, mamba_dt_rank=4, num_experts=2,
    ),
    "Dbrx": dict(
        d_model=16, n_heads=2, n_layers=2, max_seq_len=32, vocab_size=VOCABULARY, use_cache=False,
        attn_config={"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 3, "moe_top_k": 2},
    ),
}  # fmt: skip

_SPACE: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, use_cache=False)
_RECURRENT: dict[str, dict[str, Any]] = {
    "Mamba": dict(_SPACE, state_size=4, expand=2, conv_kernel=4, time_step_rank=4),
    "Mamba2": dict(_SPACE, state_size=4, expand=2, num_heads=4, head_dim=8, n_groups=1, chunk_size=4),
    "FalconMamba": dict(_SPACE, state_size=4, time_step_rank=4),
    "Rwkv": dict(_SPACE, attention_hidden_size=16, intermediate_size=24, context_length=32),
    "xLSTM": dict(_SPACE, num_blocks=2, num_heads=2),
    "RecurrentGemma": dict(
        _SPACE, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24, lru_width=16,
        attention_window_size=8,
    ),
}  # fmt: skip

_CONFIGS = {"GPT2LMHead": "GPT2", "OpenAIGPTLMHead": "OpenAIGPT", "Gemma3": "Gemma3Text"}


def specimens() -> Iterator[Specimen]:
    """Each trained to predict the next token, every text by itself."""
    for name, options in (_DENSE | _MIXTURES | _RECURRENT).items():
        head = f"{name}Model" if name.endswith("LMHead") else f"{name}ForCausalLM"
        build = partial(transformer, f"{_CONFIGS.get(name, name)}Config", head, options)
        yield Specimen(f"transformers/{name.removesuffix('LMHead')}", build, texts, causal)
