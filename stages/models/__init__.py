"""Models, tokenizers and adapters of the user's and of the run; torch set up for them."""
