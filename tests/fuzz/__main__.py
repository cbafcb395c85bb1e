"""`python -m tests.fuzz [TARGET ...] [--seconds N] [--seed N]`, from the repository root: longer than the tests do."""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shardckpt.errors import ShardckptError

from .mutations import VALUES, Edit, apply
from .structures import restructure
from .targets import TARGETS

_SECONDS = 3.0
"""What one run may take, with a second for each megabyte: three times what is promised, for a busy machine."""

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
            again = dice.getrandbits(64)
            data = restructure(seeds[which], random.Random(again)) if again % 2 else None
            data = apply(seeds[which], damage) if data is None else data
            runs += 1
            started = time.process_time()
            try:
                target.run(which, data)
            except ShardckptError:
                refused += 1
            except Exception as error:  # noqa: BLE001  (those are what is looked for)
                place = traceback.extract_tb(error.__traceback__)[-1]
                if (key := f"{type(error).__name__} at {place.filename}:{place.lineno}") not in known:
                    known.add(key)
                    print(f"{name}: {key}: {str(error)[:200]}\n  seed {which}, structure {again}, damage {damage}")
            spent = time.process_time() - started
            if spent > _SECONDS + len(data) / 1e6 and "slow" not in known:
                known.add("slow")
                print(
                    f"{name}: {spent:.1f} s for {len(data)} bytes\n  seed {which}, structure {again}, damage {damage}"
                )
        failures += len(known)
        print(f"{name}: {runs} runs, {refused} refused, {len(known)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
