"""How people write sizes in bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from shardckpt.errors import UsageError

_SIZE = re.compile(r"(?P<number>[0-9]{1,30}(\.[0-9]{1,30})?)\s*(?P<unit>[KMGTP]?)(?P<binary>i?)B?", re.IGNORECASE)


def parse_size(text: int | str) -> int:
    """Return bytes: `5GB` is decimal, `5GiB` binary, a plain number bytes.

    Raises:
        UsageError: It is not a size, or not positive.
    """
    match = _SIZE.fullmatch(str(text).strip())
    value = 0
    if match and (match["unit"] or not match["binary"]):
        step = 1024 if match["binary"] else 1000
        value = int(Fraction(match["number"]) * step ** " KMGTP".index(match["unit"].upper() or " "))
    if value <= 0:
        raise UsageError(
            "a size must be a number of bytes", found=repr(text), expected="a number such as 5GB, 512MiB or 1000000"
        )
    return value
