"""Callbacks of a run: curriculum, guard against non-finite numbers, seeds, progress, timing."""
