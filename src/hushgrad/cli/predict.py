"""``hushgrad predict``: predictions of a trained model for new records."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from typing import TYPE_CHECKING, Any

from hushgrad.cli._parser import Parser, print_json
from hushgrad.cli._paths import add_model, require_model, require_place, require_records, tell_undeclared
from hushgrad.cli._waiting import waiting

if TYPE_CHECKING:
    from hushgrad.recipes.predict import Predictor
    from hushgrad.recipes.table_file import Records


def _parser() -> Parser:
    parser = Parser(
        "predict",
        "Predict with a trained model. The model file holds the network and the encoder, so nothing else is needed. FILE is what the\n"
        "model was trained on, with labels or without: a CSV table, lines of text, a picture or a folder of them, an array (.npy).\n"
        "Predictions cost no privacy for the training records.",
        example="hushgrad predict runs/bank new-customers.csv --out predictions.csv",
    )
    add_model(parser)
    parser.takes("file FILE", "the records")
    parser.takes("--out PATH", "write a CSV file instead of printing it")
    parser.flag("--probabilities", "a column for each class")
    return parser


def run(words: list[str]) -> int:
    """Predict; see ``hushgrad predict --help``."""
    options = _parser().parse(words)
    require_place(options.out)
    require_model(options.model)
    require_records(options.file)
    with waiting("Predicting"):
        from hushgrad.recipes import load_predictor

        predictor = load_predictor(options.model, allow_code=options.allow_code)
        records = predictor.records(options.file)
        titles, lines = _answers(predictor, records, options)
        undeclared = predictor.encoder.undeclared(records.rows)
    if options.json:
        print_json({"predictions": [dict(zip(titles, line, strict=True)) for line in lines], "undeclared": undeclared})
        return 0
    tell_undeclared(undeclared)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([titles, *lines])
    if options.out:
        from hushgrad.release.atomic import written

        written(options.out, text.getvalue())
        print(f"{len(lines)} predictions: {options.out}")
    else:
        sys.stdout.write(text.getvalue())
    return 0


def _answers(predictor: Predictor, records: Records, options: argparse.Namespace) -> tuple[list[str], list[list[Any]]]:
    rows = records.rows
    titles = [*(["file"] if records.files else []), "prediction"]
    first = [[str(file)] for file in records.files] if records.files else [[] for _ in rows]
    if predictor.description.vocabulary == predictor.description.classes:  # a language model: text follows text
        return titles, [[*start, text] for start, text in zip(first, predictor(rows), strict=True)]
    found = predictor.probabilities(rows)
    best = found.max(dim=1) if len(rows) else None
    names = predictor.names
    lines = [
        [*first[i], names[int(best.indices[i])], round(float(best.values[i]), 6)] for i in range(len(rows)) if best is not None
    ]
    titles += ["probability"]
    if options.probabilities:
        titles += [f"p({name})" for name in names]
        lines = [[*line, *(round(float(p), 6) for p in found[i])] for i, line in enumerate(lines)]
    return titles, lines
