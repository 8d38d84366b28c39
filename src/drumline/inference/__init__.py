"""A trained model at work: loaded from a run, applied to images, and its predictions written down."""
