"""Runs in a store without a journal and without training."""

import time

from lit_memory.run.journal import result_rows


def log(tracker, run_id, metrics, step):
    """Log metrics of one step."""
    now = time.time_ns() // 1_000_000
    tracker.write(run_id, [(name, step, value, now) for name, value in metrics.items()])


def finish(tracker, run_id, results, totals, times=()):
    """Log the results of a test and FINISHED."""
    now = time.time_ns() // 1_000_000
    tracker.write(run_id, [(*row, now) for row in result_rows(results, totals, times)])
    tracker.end(run_id, "FINISHED")
