"""Runs to MLflow: options -> sweep -> work list -> launchers -> engine -> tracking -> reporting."""
