"""Tasks: what all of them have (``base``), what some families add (``mixins``), and a file for every task."""
