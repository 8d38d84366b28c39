"""Decoding, cropping and resizing on the GPU, with the pixels of the CPU."""
