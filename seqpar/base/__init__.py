"""What every room uses: checks of arguments, caches bounded in bytes, operators and types of ``torch.library``."""
