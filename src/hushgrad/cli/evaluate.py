"""``hushgrad evaluate``: how good a trained model is on records with labels."""

from __future__ import annotations

from hushgrad.cli._parser import Parser, say
from hushgrad.cli._paths import add_model, require_model, require_records, tell_undeclared
from hushgrad.cli._waiting import waiting


def _parser() -> Parser:
    parser = Parser(
        "evaluate",
        "Test a trained model on records with labels. What is printed is computed from FILE without noise: on records that somebody\n"
        "has to protect, the figures are as sensitive as those records. Records that the model was trained on are not a test.",
        example="hushgrad evaluate runs/bank held-out.csv",
    )
    add_model(parser)
    parser.takes("file FILE", "records with labels, in the form that the model was trained on")
    return parser


def run(words: list[str]) -> int:
    """Evaluate; see ``hushgrad evaluate --help``."""
    options = _parser().parse(words)
    require_model(options.model)
    require_records(options.file)
    with waiting("Evaluating"):
        from hushgrad.recipes import evaluate, load_predictor
        from hushgrad.recipes.metrics import compared

        predictor = load_predictor(options.model, allow_code=options.allow_code)
        records = predictor.labelled(options.file)
        undeclared = predictor.encoder.undeclared(predictor.rows(options.file))
        found = {"records": len(records), **evaluate(predictor.model, records)}
    tell_undeclared({} if options.json else undeclared)
    figures = f"{len(records)} records, accuracy {found['test_accuracy']:.2%}, loss {found['test_loss']:.4f}."
    return say(options, {**found, "undeclared": undeclared}, f"{figures}\n{compared(found)}".rstrip("\n"))
