"""The report of finished runs: figures, tables, verdict and page. ``load`` reads one for redrawing."""

from lit_memory.report.saved import load

__all__ = ["load"]
