"""The report of finished runs: figures, tables, verdict and page."""
