"""How a model is laid out over processes and devices: one strategy for each layout."""
