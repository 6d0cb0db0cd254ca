"""References that share no code with the product: NumPy models, and checkpoints that transformers writes."""
