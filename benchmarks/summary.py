"""Print the goals of speed and memory, one a line: measured, goal, met or missed, date and machine.

    python benchmarks/summary.py

The rows are those that the benchmarks recorded in RESULTS.md. The table that opens RESULTS.md is drawn anew from them.
"""

from __future__ import annotations

from results import RESULTS, summarize, with_summary


def main() -> None:
    """Print the table, and write it into RESULTS.md."""
    text = with_summary(RESULTS.read_text(encoding="utf-8"))
    RESULTS.write_text(text, encoding="utf-8")
    print(summarize(text))


if __name__ == "__main__":
    main()
