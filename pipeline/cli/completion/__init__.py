"""What the Tab key offers: commands, runs, settings. Answered before anything slow is imported."""
