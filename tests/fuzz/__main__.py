"""`python -m tests.fuzz [TARGET ...] [--seconds N] [--seed N]`, from the repository root: longer than the tests do."""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "format")]

from shardckpt.errors import ShardckptError  # noqa: E402  (the samples' folder is not on the path yet)

from .mutations import VALUES, Edit, apply  # noqa: E402
from .targets import TARGETS  # noqa: E402

_KINDS = ("set", "flip", "insert", "delete", "repeat", "cut")


def draw(dice: random.Random) -> list[Edit]:
    """Return random damage."""
    return [
        Edit(dice.choice(_KINDS), dice.randrange(65536), dice.randrange(65), dice.choice(VALUES))
        for _ in range(dice.randint(1, 4))
    ]


def main() -> int:
    """Fuzz the targets in turn; print what each did, and every failure once with what reproduces it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of: {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=float, default=10, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failures = 0
    for name in options.targets or TARGETS:
        target, dice = TARGETS[name], random.Random(f"{options.seed} {name}")
        seeds, end = target.seeds(), time.monotonic() + options.seconds
        runs = refused = 0
        known: set[str] = set()
        while time.monotonic() < end:
            which, damage = dice.randrange(len(seeds)), draw(dice)
            runs += 1
            try:
                target.run(which, apply(seeds[which], damage))
            except ShardckptError:
                refused += 1
            except Exception as error:  # noqa: BLE001  (those are what is looked for)
                place = traceback.extract_tb(error.__traceback__)[-1]
                if (key := f"{type(error).__name__} at {place.filename}:{place.lineno}") not in known:
                    known.add(key)
                    print(f"{name}: {key}: {error}\n  seed {which}, damage {damage}")
        failures += len(known)
        print(f"{name}: {runs} runs, {refused} refused, {len(known)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
