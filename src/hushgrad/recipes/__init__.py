"""Recipes: named models and data, and small files that say what to train on them; behind ``hushgrad train``."""

from __future__ import annotations

from hushgrad.recipes.data import DATA, Data
from hushgrad.recipes.models import MODELS
from hushgrad.recipes.recipe import DEMO, Recipe, load_recipe
from hushgrad.recipes.session import Outcome, evaluate, train

__all__ = ["DATA", "DEMO", "MODELS", "Data", "Outcome", "Recipe", "evaluate", "load_recipe", "train"]
