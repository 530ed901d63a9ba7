"""Secret Sharer: random secrets are planted in the training text. Does the trained model know them better than chance?"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hushgrad._printed import at_most
from hushgrad.audit import exposure
from hushgrad.experiments.base import Claim, Context, Findings, Stated, Table
from hushgrad.experiments.characters import ALPHABET, bits, encoded, text, windows
from hushgrad.experiments.picture import MARKS, panel
from hushgrad.experiments.training import mean_and_error, plus_minus, trained
from hushgrad.recipes.models import GPT
from hushgrad.train import Plan

claim = Stated("memorisation")
PREFIX, DIGITS, LENGTH, DELTA = "my number is ", 6, 24, 1e-5
CHANCE = 1 / math.log(2)  # expected exposure, in bits, of a secret that the model has never seen
NO_PRIVACY = math.inf


class _Size(NamedTuple):
    windows: int
    epochs: int
    batch: int
    width: int
    epsilons: tuple[float, ...]
    secrets: dict[int, int]  # how many, by how often each is planted; many of those planted once, whose exposure varies most
    references: int
    seeds: int

    @property
    def repeats(self) -> tuple[int, ...]:
        return tuple(self.secrets)


_FULL = _Size(1500, 25, 100, 32, (2.0, 8.0, 32.0, NO_PRIVACY), {1: 30, 4: 5, 16: 5}, 4000, 2)
_QUICK = _Size(100, 40, 50, 32, (2.0, NO_PRIVACY), {1: 40, 16: 4}, 500, 1)
MARGIN = 1.0  # bits above chance that still count as "not memorised"


def run(context: Context) -> Findings:
    """Exposure of planted secrets over epsilon and over how often they were planted."""
    size = _QUICK if context.quick else _FULL
    found: dict[tuple[float, int], list[float]] = {(e, r): [] for e in size.epsilons for r in size.repeats}
    quality: dict[float, list[float]] = {e: [] for e in size.epsilons}
    for epsilon, seed in context.track([(e, s) for e in size.epsilons for s in range(size.seeds)], "train"):
        train, test, secrets, references = _planted(context, size, context.seed + seed)
        model = _model(train, size, epsilon, context.seed + seed)
        quality[epsilon].append(bits(model, test))
        reference = _losses(model, references)
        for repeats, planted in secrets.items():
            found[epsilon, repeats] += exposure(_losses(model, planted), reference).tolist()
    return Findings(
        claims=_claims(size, found, quality),
        tables=(_table(size, found, quality),),
        draw=lambda figure: _draw(figure, size, found, quality),
        caption=f"(a) Exposure in bits (log2 of candidates over rank, among {size.references} candidates) of {DIGITS}-digit secrets over "
        "how often they were planted, mean with two standard errors; dotted: a secret that the model has never seen. (b) Bits per "
        "character on other text. Lower is better in both.",
        data={
            "exposure": {f"epsilon {e}, planted {r} times": v for (e, r), v in found.items()},
            "bits_per_character": {str(e): v for e, v in quality.items()},
        },
    )


# The text and its secrets -------------------------------------------------------------------------------------------------


def _planted(context: Context, size: _Size, seed: int) -> tuple[Tensor, Tensor, dict[int, Tensor], Tensor]:
    """(training windows with secrets among them, other windows, the secrets by number of repeats, candidates never planted)."""
    pieces = windows(text(context), LENGTH)
    rng = torch.Generator().manual_seed(seed)
    pieces = pieces[torch.randperm(len(pieces), generator=rng)]
    count = sum(size.secrets.values())
    candidates = _secrets(count + size.references, rng)
    planted = dict(zip(size.repeats, candidates[:count].split(list(size.secrets.values())), strict=True))
    copies = [secrets.repeat(repeats, 1) for repeats, secrets in planted.items()]
    half = min(size.windows, len(pieces) // 2)
    return torch.cat([pieces[:half], *copies]), pieces[half : 2 * half], planted, candidates[count:]


def _secrets(count: int, rng: torch.Generator) -> Tensor:
    """Distinct lines "my number is ......", padded with new lines to a window."""
    numbers = torch.randperm(10**DIGITS, generator=rng)[:count].tolist()
    width = LENGTH + 1
    return torch.stack([encoded(f"{PREFIX}{number:0{DIGITS}d}".ljust(width, "\n")) for number in numbers])


def _losses(model: nn.Module, sequences: Tensor) -> Tensor:
    """Minus the log-probability of the digits, given the prefix."""
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(part[:, :-1]), part[:, 1:], reduction="none")[:, len(PREFIX) - 1 : len(PREFIX) - 1 + DIGITS]
            for part in sequences.split(1000)
        ]
    return torch.cat(losses).sum(dim=1)


# Training -----------------------------------------------------------------------------------------------------------------


def _model(train: Tensor, size: _Size, epsilon: float, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = GPT(len(ALPHABET), LENGTH, width=size.width, heads=2, layers=1)
    if epsilon == NO_PRIVACY:
        return _without_privacy(model, train, size)
    data = TensorDataset(train[:, :-1].contiguous(), train[:, 1:].contiguous())
    plan = Plan.dpsgd(
        epsilon=epsilon, delta=DELTA, max_grad_norm=1.0, batch_size=size.batch, dataset_size=len(data), epochs=size.epochs
    )
    return trained(model, lambda p: torch.optim.Adam(p, lr=0.005), plan, data, seed=seed)


def _without_privacy(model: nn.Module, train: Tensor, size: _Size) -> nn.Module:
    """The same optimizer, number of steps and batch size, without clipping and noise."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(math.ceil(size.epochs * len(train) / size.batch)):
        batch = train[torch.randint(len(train), (size.batch,))]
        optimizer.zero_grad()
        F.cross_entropy(model(batch[:, :-1]), batch[:, 1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


# Claims, table, picture ---------------------------------------------------------------------------------------------------


def _claims(size: _Size, found: dict[tuple[float, int], list[float]], quality: dict[float, list[float]]) -> tuple[Claim, ...]:
    low, most, largest = size.epsilons[0], size.repeats[-1], math.log2(size.references + 1)
    known = mean_and_error(found[NO_PRIVACY, most])
    claims = (
        claim.measured("leak", known, expected=largest / 2, most=most, chance=CHANCE, largest=largest),
        claim.measured("repeated, memorised", _difference(found[NO_PRIVACY, most], found[NO_PRIVACY, 1]), most=most),
        claim.measured("once, memorised", _difference(found[NO_PRIVACY, 1], [CHANCE])),
        *(_eliminated(epsilon, found[epsilon, 1]) for epsilon in size.epsilons[:-1]),
        claim.measured("quality", _difference(quality[low], quality[NO_PRIVACY])),
    )
    # The small set of the quick form has 16 copies in 200 lines: no epsilon of use hides them, and none is claimed to.
    return claims if len(size.epsilons) < 3 else (*claims, _repeated(low, most, mean_and_error(found[low, most]), known))


def _difference(more: list[float], less: list[float]) -> tuple[float, float]:
    (x, dx), (y, dy) = mean_and_error(more), mean_and_error(less)
    return x - y, math.hypot(dx, dy)


def _eliminated(epsilon: float, found: list[float]) -> Claim:
    mean, error = mean_and_error(found)
    # The exposure of an unknown secret is exponential, so its standard deviation is its mean.
    value = mean, max(error, CHANCE / math.sqrt(len(found)))
    words = {"epsilon": at_most(epsilon, 6), "chance": CHANCE, "count": len(found)}
    return claim.measured("eliminated", value, expected=CHANCE + MARGIN, **words)


def _repeated(epsilon: float, copies: int, private: tuple[float, float], known: tuple[float, float]) -> Claim:
    ratio = private[0] / known[0]
    error = ratio * math.hypot(private[1] / private[0], known[1] / known[0])
    return claim.measured("repeated", (ratio, error), copies=copies, epsilon=at_most(epsilon, 6))


def _name(epsilon: float) -> str:
    return "no privacy" if epsilon == NO_PRIVACY else f"eps = {at_most(epsilon, 6)}"


def _table(size: _Size, found: dict[tuple[float, int], list[float]], quality: dict[float, list[float]]) -> Table:
    return Table(
        title=f"Exposure in bits, mean ± standard error over {size.seeds} seeds and "
        f"{', '.join(f'{count} secrets planted {r} x' for r, count in size.secrets.items())} in each; at most "
        f"{math.log2(size.references + 1):.1f}, {CHANCE:.2f} by chance. {size.epochs} epochs, batch {size.batch}, Adam at 0.005 for all, "
        f"one-layer transformer of width {size.width}, delta = {at_most(DELTA, 6)}",
        columns=("run", *(f"planted {r} x" for r in size.repeats), "bits per character (other text)"),
        rows=tuple((_name(e), *(plus_minus(found[e, r]) for r in size.repeats), plus_minus(quality[e])) for e in size.epsilons),
    )


def _draw(figure: Any, size: _Size, found: dict[tuple[float, int], list[float]], quality: dict[float, list[float]]) -> None:
    spec = figure.add_gridspec(1, 2, width_ratios=(3, 2))
    first = panel(figure, spec[0], title="(a) memorisation", x="copies of the secret in the data", y="exposure (bits)", log="x")
    looks = [MARKS[key] for key in ("best", "nu", "more", "anti", "independent")]
    chosen = dict(zip(size.epsilons, [*looks[: len(size.epsilons) - 1], looks[-1]], strict=True))
    for epsilon, look in chosen.items():
        pairs = [mean_and_error(found[epsilon, r]) for r in size.repeats]
        error = [2 * e for _, e in pairs]
        first.errorbar(size.repeats, [m for m, _ in pairs], yerr=error, label=_name(epsilon), markersize=4, capsize=2, **look)
    first.axhline(CHANCE, color="black", linestyle=":", linewidth=1, label="never planted")
    first.set_ylim(bottom=0)
    first.legend(frameon=False, fontsize=8)
    second = panel(figure, spec[1], title="(b) quality on other text", x="", y="bits per character", log="")
    second.set_axisbelow(True)
    pairs = [mean_and_error(quality[e]) for e in size.epsilons]
    colours = [chosen[e]["color"] for e in size.epsilons]
    second.bar([_name(e) for e in size.epsilons], [m for m, _ in pairs], yerr=[2 * e for _, e in pairs], color=colours, capsize=3)
