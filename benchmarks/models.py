"""The models and data of the step benchmark, written once for every implementation."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CASES", "Case", "files_in_memory", "memory"]

_POPULATE_READ = 22  # of madvise


def memory(field: str) -> float:
    """What this process holds, in MiB: ``VmRSS`` now, ``VmHWM`` at the most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    return float("nan")


def files_in_memory() -> None:
    """Libraries and other mapped files count as held from now on, whole: a copy of a process maps them anew, page by page as it runs."""
    library = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, file = line.split()[:5]
        if rights[0] == "r" and file != "0":
            first, last = (int(end, 16) for end in span.split("-"))
            library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _POPULATE_READ)


class Case(NamedTuple):
    """A model, a batch, and the figures it is held to."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    size: int
    target: float  # CPU time over plain PyTorch, one thread, noise on
    wall_target: float | None = None  # the same by wall time with two threads
    rounds: int = 30  # at least this many interleaved rounds; where proofs are repeated, far more than they are
    slow_peers: tuple[str, ...] = ()  # peers that take minutes here and are left out of --quick
    lazy_target: float | None = None  # the same as target, with lazy tables


def _logistic() -> nn.Module:
    return nn.Linear(784, 10)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def _cnn() -> nn.Module:
    """The MNIST network of the TensorFlow Privacy tutorial."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


class _Block(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(16, c_in), nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = nn.GroupNorm(16, c_out), nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.skip = nn.Conv2d(c_in, c_out, 1, stride, bias=False) if stride > 1 or c_in != c_out else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        y = self.conv2(F.relu(self.norm2(self.conv1(h))))
        return y + (x if self.skip is None else self.skip(h))


def _wide_resnet(depth: int = 16, width: int = 4) -> nn.Module:
    widths, blocks = (16, 16 * width, 32 * width, 64 * width), (depth - 4) // 6
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    for stage in range(3):
        for block in range(blocks):
            c_in = widths[stage] if block == 0 else widths[stage + 1]
            layers.append(_Block(c_in, widths[stage + 1], 2 if stage and block == 0 else 1))
    head = [nn.GroupNorm(16, widths[3]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[3], 10)]
    return nn.Sequential(*layers, *head)


class _Attention(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        q, k, v = (t.view(B, T, self.heads, d // self.heads).transpose(1, 2) for t in self.qkv(x).split(d, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, d))


class _Layer(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(d), _Attention(d, heads), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small decoder; position ids are a contiguous copy per example, because Opacus ghost refuses broadcast ones."""

    def __init__(self, layers: int = 4, d: int = 256, heads: int = 4, vocabulary: int = 5000, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, d), nn.Embedding(length, d)
        self.layers = nn.Sequential(*(_Layer(d, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        where = torch.arange(ids.shape[1]).expand(ids.shape[0], -1).contiguous()
        return self.head(self.norm(self.layers(self.tokens(ids) + self.positions(where))))


class _TextClassifier(nn.Module):
    def __init__(self, vocabulary: int = 50_000, d: int = 128) -> None:
        super().__init__()
        self.table, self.hidden, self.out = nn.Embedding(vocabulary, d), nn.Linear(d, d), nn.Linear(d, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(F.relu(self.hidden(self.table(ids).mean(1))))


def _images(shape: tuple[int, ...]) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda B: (torch.randn(B, *shape), torch.randint(10, (B,)))


def _text(B: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(5000, (B, 129))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _reviews(B: int) -> tuple[Tensor, Tensor]:
    return torch.randint(50_000, (B, 64)), torch.randint(2, (B,))


class _Logits(nn.Module):
    """A model of transformers, as one that returns its logits."""

    def __init__(self, model: nn.Module, key: str, *, decodes: bool = False) -> None:
        super().__init__()
        self.model, self.key, self.decodes = model, key, decodes

    def forward(self, x: Tensor) -> Tensor:
        more = {"decoder_input_ids": x} if self.decodes else {}
        return self.model(**{self.key: x}, **more).logits


_WORDS, _LENGTH = 1000, 64


def _transformers(model: str, key: str = "input_ids", *, decodes: bool = False, **sizes: object) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, model.split("For")[0] + "Config")(**sizes)
        return _Logits(getattr(transformers, model)(config), key, decodes=decodes)

    return make


_SIZES = {"vocab_size": _WORDS, "hidden_size": 128, "num_hidden_layers": 2, "use_cache": False}
_HEADS = {"num_attention_heads": 4, "max_position_embeddings": 128}
_moe = _transformers("MixtralForCausalLM", **_SIZES, **_HEADS, num_key_value_heads=4, intermediate_size=256, num_local_experts=4)
_opt = _transformers("OPTForCausalLM", **_SIZES, **_HEADS, ffn_dim=512, word_embed_proj_dim=128, dropout=0.0)
_t5 = _transformers(
    "T5ForConditionalGeneration", decodes=True, vocab_size=_WORDS, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4,
    dropout_rate=0.0, use_cache=False,
)  # fmt: skip
_swin = _transformers(
    "SwinForImageClassification", "pixel_values", image_size=32, patch_size=2, embed_dim=48, depths=[2, 2], num_heads=[2, 4],
    window_size=4, num_labels=10, drop_path_rate=0.0,
)  # fmt: skip
_llama = _transformers(
    "LlamaForCausalLM", vocab_size=2048, hidden_size=256, num_hidden_layers=4, intermediate_size=680, use_cache=False, **_HEADS
)  # fmt: skip


def _lora() -> nn.Module:
    """Adapters of rank 4 beside every matrix of the same model's layers, which are frozen."""
    import peft

    model = _llama()
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=r".*_proj"))  # type: ignore[arg-type]


_mamba = _transformers("MambaForCausalLM", **_SIZES, state_size=8)


def _words(B: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(_WORDS, (B, _LENGTH + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


HEAVY = ("opacus hooks", "opacus functorch", "opacus ew")
EVERY = (*HEAVY, "opacus ghost")
CASES = [
    Case("logreg", _logistic, _images((784,)), 256, 1.5, rounds=300),
    Case("mlp", _mlp, _images((784,)), 64, 1.3, 1.5, slow_peers=HEAVY),
    Case("mlp", _mlp, _images((784,)), 256, 1.2, slow_peers=HEAVY),
    Case("cnn", _cnn, _images((1, 28, 28)), 64, 1.25, 1.5),
    Case("cnn", _cnn, _images((1, 28, 28)), 256, 1.25),
    Case("wrn16-4", _wide_resnet, _images((3, 32, 32)), 64, 1.35, 1.4, rounds=5),
    Case("gpt", GPT, _text, 16, 1.3, rounds=10),
    Case("text 50k", _TextClassifier, _reviews, 64, 2.0, slow_peers=HEAVY, lazy_target=1.2),
    Case("llama", _llama, _words, 8, 1.3, rounds=20, slow_peers=HEAVY),
    Case("llama, LoRA", _lora, _words, 8, 1.2, rounds=20, slow_peers=HEAVY),
    Case("moe", _moe, _words, 16, 1.5, rounds=20, slow_peers=EVERY),
    Case("opt", _opt, _words, 16, 1.5, rounds=20, slow_peers=EVERY),
    Case("t5", _t5, _words, 16, 1.5, rounds=20, slow_peers=EVERY),
    Case("swin", _swin, _images((3, 32, 32)), 16, 1.5, rounds=20, slow_peers=EVERY),
    Case("mamba", _mamba, _words, 16, 4.0, rounds=5, slow_peers=EVERY),
]
