"""Lightning: a module per architecture, a data module per task."""
