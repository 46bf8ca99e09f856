"""Run the whole list: ``python -m tests.mutations``."""

from __future__ import annotations

import argparse
import sys

from tqdm import tqdm

from .judge import FAULTS, judge


def main() -> int:
    argparse.ArgumentParser(
        "python -m tests.mutations", description="Show that every planted fault is noticed."
    ).parse_args()
    survivors = []
    for fault in tqdm(FAULTS, unit="fault"):
        verdict = judge(fault)
        tqdm.write(f"{'caught ' if verdict.caught else 'MISSED '} {fault}: {verdict.how}")
        if not verdict.caught:
            survivors.append(fault)
    print(f"{len(FAULTS) - len(survivors)} of {len(FAULTS)} faults caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
