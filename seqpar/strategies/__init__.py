"""The strategies: one file for each algorithm, and what the algorithms share."""
