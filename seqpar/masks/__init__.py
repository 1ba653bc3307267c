"""Which keys a query sees, as rules and as runs of intervals."""
