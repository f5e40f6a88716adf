"""What stands in paths."""

from typing import Annotated

from fastapi import Path

from schemas.base import Ordinal
from schemas.versions import BaselineName

TransactionId = Annotated[str, Path(description="A transaction's id.", examples=["016522e322fad07b"])]
OperationId = Annotated[str, Path(description="An operation's id.", examples=["7d20f1c4aa95e3b8"])]
Layer = Annotated[
    Ordinal, Path(description="The checkpoint's number of a layer that has experts.", examples=[3])
]
Expert = Annotated[Ordinal, Path(description="The checkpoint's number of an expert.", examples=[5])]
Tensor = Annotated[
    str, Path(description="A tensor's name in the checkpoint.", examples=["model.norm.weight"])
]
Baseline = Annotated[BaselineName, Path(description="A baseline's name.", examples=["good"])]
