"""``Sharding``: which tokens of a sequence each rank holds; and the constants of an attention call."""
