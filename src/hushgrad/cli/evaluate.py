"""``hushgrad evaluate``: how good a trained model is on records with labels."""

from __future__ import annotations

from hushgrad.cli._parser import Parser, print_json
from hushgrad.cli._there import require_model, require_records, tell_undeclared
from hushgrad.cli._waiting import waiting


def _parser() -> Parser:
    parser = Parser(
        "evaluate",
        "Test a trained model on records with labels. What is printed is computed from FILE without noise: on records that somebody\n"
        "has to protect, the figures are as sensitive as those records. Records that the model was trained on are not a test.",
        example="hushgrad evaluate runs/bank held-out.csv",
    )
    parser.add_argument("model", metavar="MODEL", help="the folder of a run, or its model.safetensors")
    parser.add_argument("file", metavar="FILE", help="records with labels, in the form that the model was trained on")
    parser.add_argument(
        "--allow-code", action="store_true", help="run what the model file names as module:function: trust it first"
    )
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
    if options.json:
        print_json({**found, "undeclared": undeclared})
        return 0
    tell_undeclared(undeclared)
    print(f"{len(records)} records, accuracy {found['test_accuracy']:.2%}, loss {found['test_loss']:.4f}.")
    print(compared(found), end="")
    return 0
