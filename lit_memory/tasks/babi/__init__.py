"""bAbI: a simulator of its stories, a reader that answers from the facts alone, and the distributed files."""
