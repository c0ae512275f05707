"""The update: an iteration's shards in, the next policy, critic and trainer state out."""
