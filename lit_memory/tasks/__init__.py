"""One file per task: a class derived from ``Task`` with its configuration as ``Config``."""
