"""What a row of a stream has: the columns, their types, and which of them were asked for.

`ext_id` is unsigned in a segment and signed in SQL: it is shown by its 64 bits, so that one of 2^63 or more is negative
and none is lost (`ext_id + 18446744073709551616` as a decimal gives it back). A timestamp keeps its milliseconds.

Owner: frozen values. Crash: nothing here touches a disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aof2.engine.spark.options import Mode, ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

TYPES: Final = {
    "offset": "bigint",
    "timestamp": "timestamp",
    "ext_id": "bigint",
    "flags": "int",
    "segment_id": "bigint",
    "payload": "binary",
}
CORRUPT_TYPE: Final = "binary"


def types_of(options: ReadOptions) -> dict[str, str]:
    """Every column there is under these options."""
    if options.mode is not Mode.PERMISSIVE:
        return TYPES
    if options.corrupt_column in TYPES:
        raise ValueError(f"option columnNameOfCorruptRecord: a stream has a column {options.corrupt_column}")
    return TYPES | {options.corrupt_column: CORRUPT_TYPE}


def schema_text(options: ReadOptions) -> str:
    return ", ".join(f"`{name}` {kind}" for name, kind in types_of(options).items())


def check_schema(schema: StructType, options: ReadOptions) -> None:
    """`.schema(…)` names some of the columns, each with its type."""
    types = types_of(options)
    for field in schema.fields:
        if field.name not in types:
            raise ValueError(f"no column {field.name}: a stream has {', '.join(types)}")
        if field.dataType.simpleString() != types[field.name]:
            raise ValueError(f"column {field.name} is {types[field.name]}, not {field.dataType.simpleString()}")


def arrow_schema(schema: StructType) -> pa.Schema:
    """Exactly what Spark compares the first batch with."""
    import pyarrow as pa

    kinds = {
        "bigint": pa.int64(),
        "int": pa.int32(),
        "binary": pa.binary(),
        "timestamp": pa.timestamp("us", "UTC"),
    }
    return pa.schema([pa.field(f.name, kinds[f.dataType.simpleString()], nullable=f.nullable) for f in schema.fields])
