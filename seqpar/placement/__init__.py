"""Who takes part in a call and which tokens and heads each rank holds; the table of strategies."""
