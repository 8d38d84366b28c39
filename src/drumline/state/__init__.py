"""Checkpoints, fingerprints and the files they stand on."""
