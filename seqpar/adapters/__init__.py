"""Attention for frameworks that have a place to put it, each in a module that is imported by its full name."""
