"""Losses and log-probabilities of a sharded sequence."""
