"""What a run of a pipeline has at hand. Owner: the driver; nothing is written here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from aof2.engine.env import Env
from aof2.engine.spark.pipelines.mounted import Mounted
from aof2.engine.spark.pipelines.seam import Tell

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Request(Protocol):
    """Any pipeline's arguments."""

    @property
    def conf(self) -> str: ...


Asked = TypeVar("Asked", bound=Request)


class Work(Generic[Asked]):
    """A request, and what all of them need."""

    def __init__(self, session: SparkSession, asked: Asked, tell: Tell, env: Env) -> None:
        self.session = session
        self.asked = asked
        self.tell = tell
        self.env = env
        self.mounted = Mounted.find(asked.conf)
