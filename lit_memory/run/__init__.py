"""Runs to MLflow: the work list, the engine, saving, tracking."""
