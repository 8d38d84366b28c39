"""A model in stages: traced, cut, split by measured times, scheduled, and computed over processes or devices."""
