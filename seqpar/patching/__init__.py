"""Changes other packages' models for the length of a call, or until they are restored. Knows PyTorch only."""
