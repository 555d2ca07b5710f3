"""Files, seeds, checks and provenance: what every part of the package may use."""
