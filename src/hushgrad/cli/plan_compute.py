"""``hushgrad plan --compute``: model size, batch size and number of steps for a language model."""

from __future__ import annotations

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad.cli._parser import Parser, ask, say, table, whole, wrapped
from hushgrad.guarantee import questions

_SHOWN = 5


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Private pre-training of a language model: which (parameters, batch size, steps) reach the least loss with this compute\n"
        "and this budget, by the scaling law of McKenna et al. (2025). Uses public numbers only and costs no privacy.",
        example="hushgrad plan --compute 1e20 --epsilon 4 --delta 1e-8 --dataset-size 1e7",
        form=" --compute FLOP",
    )
    parser.takes("--compute FLOP", "of the run: 6 x parameters x steps x batch size x 512 tokens", type=float, required=True)
    parser.takes("--epsilon", "the budget", type=float, required=True)
    parser.takes("--delta", "the probability that is left out of the promise", type=float, required=True)
    parser.takes("--dataset-size N", "public number of records, 512 tokens each", type=whole, required=True)
    return parser


def run(words: list[str]) -> int:
    """Answer; see ``hushgrad plan --compute FLOP --help``."""
    options = _parser().parse(words)
    ask(questions(_check.positive(epsilon=options.epsilon), _check.delta(delta=options.delta), records=options.dataset_size))
    from hushgrad.planner.model_shapes import human
    from hushgrad.planner.scaling_law import allocations, saturating

    budget = {"epsilon": options.epsilon, "delta": options.delta, "dataset_size": options.dataset_size}
    found = allocations(compute=options.compute, **budget, exact=_SHOWN)[:_SHOWN]
    enough = saturating(**budget)
    rows = [("parameters", "batch size", "steps", "noise", "loss")]
    for one in found:
        cells = (f"{one.batch_size}", f"{one.steps}", f"{one.noise_multiplier:.4g}", f"{one.loss:.2f}")
        rows.append((human(one.parameters), *cells))
    shown = f"epsilon {at_most(options.epsilon, 6)}, delta {at_most(options.delta, 6)}"
    return say(
        options,
        {"allocations": [one.to_json() for one in found], "saturating_compute": enough, "fit": _FIT},
        f"{options.compute:.3g} operations, {shown}, {options.dataset_size} records, Poisson sampling\n\n{table(rows)}\n",
        wrapped(f"noise: multiplier of the clip norm. More than about {enough:.1g} operations lower the loss by less than 1 %."),
        wrapped(_FIT),
    )


_FIT = (
    "The law is equation 3 of McKenna et al. (2025) with constants fitted to the twenty rows of their Table 2: BERT models of 4.5 to "
    "335 million parameters, 512 tokens, DP-Adam, 1,000 to 128,000 steps. On rows that were left out it is off by 2.4 % of the loss (at "
    "most 6.7 %), and by at most a factor of 1.9 in the best size (docs/scale.md). It ranks; your text has another loss."
)
