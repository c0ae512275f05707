"""Steps of a rollout: prompts and an engine in, whole conversations out."""
