"""YAML to runs: reading, merging, claims, checks."""
