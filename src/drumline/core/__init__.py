"""What all other packages use: errors, text, files, locks, processes, arithmetic."""
