"""Titans."""
