"""What a run reports: times, logs, the timeline of a step, and the display."""
