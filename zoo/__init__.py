"""The zoo: models that nobody here wrote, each trained one private step and compared with single-example passes in float64."""

from zoo._torchvision import declare

declare()  # before any family is imported: transformers and timm import torchvision where there is one
