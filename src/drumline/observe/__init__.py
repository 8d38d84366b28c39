"""What a run tells while it runs: times, logs and the display."""
