"""What the remote's requests and bytes cost, by a small table of prices.

The defaults are S3 Standard's list prices in us-east-1, in dollars, as of 2025; every one of them can be said otherwise
(`aof2 report --price put=0.005`). An estimate: requests that the log does not tell of (listings, the fence, reads that
filled no cache) are not in it, and bytes count before compression.

Owner: pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from aof2.engine.errors import LimitError

GIB: Final = 1 << 30
MONTH_MS: Final = 30 * 86_400_000


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars: of a thousand requests; of a GiB that is fetched; of a GiB that lies there for a month."""

    put: float = 0.005
    get: float = 0.0004
    delete: float = 0.0
    transfer: float = 0.0
    storage: float = 0.023


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    puts: int
    gets: int
    deletes: int
    fetched_bytes: int
    stored_bytes: int
    put_dollars: float
    get_dollars: float
    delete_dollars: float
    transfer_dollars: float
    storage_dollars_a_month: float


def prices_of(texts: Sequence[str]) -> Prices:
    """`put=0.005` …; LimitError says what there is."""
    names = Prices.__struct_fields__
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            amount = float(value)
        except ValueError:
            amount = -1.0
        if name not in names or not 0 <= amount < 1e9:
            raise LimitError(f"--price {text}: it is NAME=DOLLARS, and NAME one of {', '.join(names)}")
        found[name] = amount
    return Prices(**found)


def cost_of(requests: Mapping[str, int], fetched_bytes: int, stored_bytes: int, prices: Prices) -> Cost:
    puts = sum(count for name, count in requests.items() if name.startswith("put_"))
    gets, deletes = requests.get("get", 0), requests.get("delete", 0)
    return Cost(
        puts=puts,
        gets=gets,
        deletes=deletes,
        fetched_bytes=fetched_bytes,
        stored_bytes=stored_bytes,
        put_dollars=puts / 1000 * prices.put,
        get_dollars=gets / 1000 * prices.get,
        delete_dollars=deletes / 1000 * prices.delete,
        transfer_dollars=fetched_bytes / GIB * prices.transfer,
        storage_dollars_a_month=stored_bytes / GIB * prices.storage,
    )
