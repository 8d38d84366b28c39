"""Exports a trained model to a file for other programs, verified before it gets its name."""
