"""What a call of a parallelized model runs: its hooks, its attention function, and its kinds of batches."""
