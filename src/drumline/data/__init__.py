"""From a data set to batches: sources, image files, the feed of a run, GPU decoding, packed sets."""
