"""What workers say and leave behind: claims on tasks, beats, hand-overs (rules: :mod:`pipeline.decide`)."""
