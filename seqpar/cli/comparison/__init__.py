"""What ``seqpar bench`` measures, how, and what it writes."""
