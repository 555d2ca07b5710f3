"""Finished runs to figure, tables and verdict."""
