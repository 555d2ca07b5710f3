"""Stands in for the work of a child process. It imports nothing else, as every child has to import it."""

import os
import signal
import time


def run_child(spec, root, uri, parent, tags, connection):
    """Send some progress, then do what the arm's name says."""
    for stage in (1, 1, 2):
        connection.send({"event": "progress", "stage": stage})
    if spec.arm == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if spec.arm == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        connection.send({"event": "progress", "stage": 3})
    if spec.arm in ("hang", "deaf"):
        time.sleep(60)
