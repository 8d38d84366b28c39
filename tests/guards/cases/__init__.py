"""Training loops with one silent mistake each, and healthy loops that look unusual."""
