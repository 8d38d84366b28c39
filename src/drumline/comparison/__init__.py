"""Compares two models layer by layer, a model with weights, and the curves of two runs."""
