"""The process groups there are: meshes, how they start, and how ranks wait for one another."""
