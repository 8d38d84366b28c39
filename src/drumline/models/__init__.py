"""Vision models by name, with named taps, and their weights in and out of files."""

from drumline.models.registry import create_model, model_names
from drumline.models.weights import load_weights

__all__ = ["create_model", "load_weights", "model_names"]
