"""What developers run, and users never import. Not installed."""
