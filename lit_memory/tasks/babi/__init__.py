"""bAbI: its world, a reader that answers from facts alone, and its files."""
