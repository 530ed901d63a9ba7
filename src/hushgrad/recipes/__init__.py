"""Recipes: named models and data, small files that say what to train on them, and model files that predict; behind ``hushgrad train``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hushgrad._lazy_import import later

if TYPE_CHECKING:
    from hushgrad.recipes.data import DATA
    from hushgrad.recipes.dataset import AugmentedImages, Data, from_datasets, label_numbers, labelled
    from hushgrad.recipes.encoders import ByteEncoder, Encoder, TableEncoder, TensorEncoder, TextEncoder
    from hushgrad.recipes.images import ImageEncoder
    from hushgrad.recipes.metrics import evaluate
    from hushgrad.recipes.models import MODELS, WideResNet
    from hushgrad.recipes.predict import Predictor, export, load_predictor
    from hushgrad.recipes.recipe import Recipe
    from hushgrad.recipes.recipe_file import DEMO, load_recipe
    from hushgrad.recipes.saved import Description, describe, load_model, read_description, save_model
    from hushgrad.recipes.saved_plans import read_plan
    from hushgrad.recipes.session import Outcome, train
    from hushgrad.recipes.table_file import Records

__all__ = [
    "DATA",
    "DEMO",
    "MODELS",
    "AugmentedImages",
    "ByteEncoder",
    "Data",
    "Description",
    "Encoder",
    "ImageEncoder",
    "Outcome",
    "Predictor",
    "Recipe",
    "Records",
    "TableEncoder",
    "TensorEncoder",
    "TextEncoder",
    "WideResNet",
    "describe",
    "evaluate",
    "export",
    "from_datasets",
    "label_numbers",
    "labelled",
    "load_model",
    "load_predictor",
    "load_recipe",
    "read_description",
    "read_plan",
    "save_model",
    "train",
]

# These need torch.
__getattr__, __dir__ = later(__name__)
