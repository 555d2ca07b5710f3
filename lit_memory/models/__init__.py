"""One file per architecture: a class derived from ``SegmentRecurrent`` with its configuration as ``Config``."""
