"""Options that several benchmarks have."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable


def add_selection(
    parser: argparse.ArgumentParser, name: str, every: Collection[str], default: Iterable[str] | None = None
) -> None:
    """Add an option of comma-separated names, each of which must be one of `every`; the default is all of them."""

    def select(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(every):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
        return names

    names = ",".join(every if default is None else default)
    parser.add_argument(name, type=select, default=names, help="comma-separated, of: %(default)s")


def add_disk_options(parser: argparse.ArgumentParser) -> None:
    """Add `--fsync` and `--folder`."""
    parser.add_argument("--fsync", choices=("both", "neither"), default="both", help="fsync for all tools or for none")
    parser.add_argument("--folder", help="folder for inputs and outputs, instead of the temporary folder")


def add_transformer_options(
    parser: argparse.ArgumentParser, *, layers: int, hidden: int, batch: int, tokens: int
) -> None:
    """Add the size of a transformer and of its batches; the arguments are the defaults."""
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--hidden", type=int, default=hidden)
    parser.add_argument("--batch", type=int, default=batch, help="sequences of each rank")
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens of a sequence")
