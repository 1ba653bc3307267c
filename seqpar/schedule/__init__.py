"""The schedule of attention over a ring of ranks: which K/V rows are sent when, and which keys each query sees."""
