"""The units of recorded probabilities: fixed point, so that sums have no order, and the bins of a calibration."""

from __future__ import annotations

FIXED_POINT = 2**24
BINS = 15
"""Bins of equal width into which the calibration error divides the probabilities from 0 to 1."""
