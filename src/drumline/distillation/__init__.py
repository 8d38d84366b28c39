"""Distillation: a student learns from labels and from a teacher, by any method, on any number of processes."""
