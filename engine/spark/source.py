"""DefaultSource: what `format("aof2")` is to Spark.

Owner: Spark makes one in each of its planning processes. Importing this module imports Spark's API and the standard
library; everything else comes with the first reader or writer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """Records of AOF2 streams: `spark.read.format("aof2").load("/aof2/events/clicks")`."""

    @classmethod
    def name(cls) -> str:
        return "aof2"

    def schema(self) -> str:
        from aof2.engine.spark.columns import schema_text
        from aof2.engine.spark.options import read_options

        return schema_text(read_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        from aof2.engine.spark.batch import reader_of
        from aof2.engine.spark.options import read_options

        return reader_of(schema, read_options(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from aof2.engine.spark.options import write_options
        from aof2.engine.spark.write import Aof2Writer

        return Aof2Writer(schema, write_options(self.options), overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        from aof2.engine.spark.options import write_options
        from aof2.engine.spark.write import Aof2StreamWriter

        return Aof2StreamWriter(schema, write_options(self.options), overwrite=overwrite)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from aof2.engine.spark.micro import Aof2StreamReader
        from aof2.engine.spark.options import read_options

        return Aof2StreamReader(schema, read_options(self.options))
