"""Models: loaded, tokenized for, adapted and merged; and torch set up for them."""
