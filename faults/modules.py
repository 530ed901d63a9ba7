"""Draw random small modules and compare what the capture attributes to each example with what that example gives alone.

    python faults/modules.py [--count 2000] [--seed 1] [--seconds 600]

Prints how many were exact and refused, and every wrong one; ends with 1 if there is one, or if a module that keeps its examples apart is
refused more often than once in a hundred.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections import Counter
from random import Random

from random_modules import examine


def main() -> int:
    """The search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so many, and say how far it came")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    counts: Counter[tuple[str, bool]] = Counter()
    end = time.monotonic() + args.seconds
    for number in range(args.count):
        verdict = examine(Random(f"{args.seed} {number}"))
        counts[verdict.word, verdict.mixes] += 1
        if verdict.word == "wrong" or (verdict.word == "refused" and not verdict.mixes):
            print(f"{args.seed} {number}: {verdict.word}: {verdict.what}", flush=True)
        if time.monotonic() > end:
            print(f"cut off after {number + 1} of {args.count}")
            break
    for (word, mixes), count in sorted(counts.items()):
        print(f"{count:6} {word}, {'examples influence each other' if mixes else 'examples apart'}")
    apart = sum(n for (_, mixes), n in counts.items() if not mixes)
    wrong = counts["wrong", True] + counts["wrong", False]
    return int(wrong > 0 or counts["refused", False] * 100 > apart)


if __name__ == "__main__":
    sys.exit(main())
