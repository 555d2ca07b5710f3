"""``python -m benchmarks [NAME ...] [--against COMMIT] [--device cuda]``."""

import argparse
import signal
import sys
from contextlib import ExitStack

from benchmarks.measure import HEADER, Failed, measure, rows, tree_of
from benchmarks.worker import SIDE
from benchmarks.works import WORKS


def main(argv: list[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure; see benchmarks/README.md.")
    arguments.add_argument("names", nargs="*", metavar="NAME", help="work, or the beginning of its name; default: all")
    arguments.add_argument("--against", metavar="COMMIT", help="ours beside ours at that commit, not beside others")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--device", choices=list(SIDE), default="cpu", help="where to compute; default: cpu")
    arguments.add_argument("--tiny", action="store_true", help="at sizes that only show that it runs")
    arguments.add_argument("--list", action="store_true", help="print the names")
    args = arguments.parse_args(argv)
    chosen = [name for name in WORKS if not args.names or name.startswith(tuple(args.names))]
    if not chosen or args.rounds < 1:
        problem = f"--rounds {args.rounds}: expected at least 1" if chosen else f"no work begins with {args.names}"
        print(f"error: {problem}; known work: {', '.join(WORKS)}", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(chosen))
        return 0
    failed = 0
    with ExitStack() as stack:
        base = (args.against, stack.enter_context(tree_of(args.against))) if args.against else None
        print(HEADER, flush=True)
        for name in chosen:
            try:
                found = measure(name, WORKS[name], args.rounds, base, args.tiny, args.device)
                print("\n".join(rows(name, found)), flush=True)
            except Failed as error:
                failed += 1
                print(f"error: {error}", file=sys.stderr, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the worktree is removed all the same
    raise SystemExit(main())
