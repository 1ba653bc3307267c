"""What a model computes from what, found by runs on a few tokens, and whether it is supported."""
