"""The report on a run: one self-contained HTML file, made from the files of a run folder alone."""
