"""A trained model as a file for other programs, verified against the original before it gets its name."""
