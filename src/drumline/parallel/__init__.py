"""How a model is laid over processes and devices."""
