"""Strict mode: the same bits on any number of processes, by sums in a fixed order."""
