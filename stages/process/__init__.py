"""Facts of the process that computes: its warnings, its bell, the user's code and values that it keeps."""
