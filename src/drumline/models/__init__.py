"""Vision models by name, with named taps."""

from drumline.models.registry import create_model, model_names

__all__ = ["create_model", "model_names"]
