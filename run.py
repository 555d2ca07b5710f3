"""python run.py experiments/armt_ablation_gamma.yaml"""
# PYTHON_ARGCOMPLETE_OK: see docs/experiments.md

import os
import signal

if __name__ == "__main__":  # a child process imports this file, too
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))  # Ctrl-C, from the first moment on
    from lit_memory.__main__ import command

    command()
