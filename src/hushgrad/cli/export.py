"""``hushgrad export``: a trained model for other programs, as torch.export's .pt2 or as ONNX."""

from __future__ import annotations

from pathlib import Path

from hushgrad.cli._parser import Parser, UsageError, say
from hushgrad.cli._paths import add_model, require_model, require_place
from hushgrad.cli._waiting import waiting


def _parser() -> Parser:
    parser = Parser(
        "export",
        "Write the network of a run for programs without hushgrad: FILE.pt2 (torch.export) or FILE.onnx (needs hushgrad[onnx]).\n"
        "The batch may have any size. Inputs are encoded as before: hushgrad.recipes.load_predictor(MODEL).encoder says how.",
        example="hushgrad export runs/bank bank.onnx",
    )
    add_model(parser)
    parser.takes("file FILE", "ends in .pt2 or .onnx")
    return parser


def run(words: list[str]) -> int:
    """Export; see ``hushgrad export --help``."""
    options = _parser().parse(words)
    if Path(options.file).suffix not in (".pt2", ".onnx"):
        raise UsageError(f"FILE {options.file} must end in .pt2 or .onnx.")
    require_place(options.file)
    require_model(options.model)
    with waiting("Exporting"):
        from hushgrad.recipes import export, load_predictor

        export(load_predictor(options.model, allow_code=options.allow_code), options.file)
    return say(options, {"file": options.file}, f"Written: {options.file}")
