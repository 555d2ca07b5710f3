"""Where runs are started."""
