"""A whole transaction with the client that openapi-python-client generates. Arguments: URL, folder."""

import sys
from pathlib import Path

from graft_client import Client
from graft_client.api.transactions import commit_transaction, open_transaction
from graft_client.api.uploads import post_patches, put_expert
from graft_client.api.versions import current_version, rollback
from graft_client.api.weights import read_expert
from graft_client.models import (
    Code,
    CurrentVersion,
    Problem,
    Receipt,
    RollbackRequest,
    Transaction,
    TransactionOptions,
    Upload,
)
from graft_client.types import File

LAYER, EXPERT = 1, 2


def read(client: Client) -> bytes:
    """The expert as the engine has it."""
    back = read_expert.sync(LAYER, EXPERT, client=client)
    assert isinstance(back, File)
    return back.payload.read()


def main(url: str, folder: Path) -> None:
    """Commit an expert and a batch, be refused four times, and go back."""
    client = Client(base_url=url)
    before = current_version.sync(client=client)
    assert isinstance(before, CurrentVersion)
    (folder / "before").write_bytes(read(client))

    options = TransactionOptions(base_version=before.version, label="python", allow_nonfinite=True)
    opened = open_transaction.sync(client=client, body=options, idempotency_key="python-1")
    again = open_transaction.sync(client=client, body=options, idempotency_key="python-1")
    assert isinstance(opened, Transaction) and isinstance(again, Transaction)
    assert again.id == opened.id
    with (folder / "expert.safetensors").open("rb") as file:
        sent = put_expert.sync(opened.id, LAYER, EXPERT, client=client, body=File(payload=file))
    with (folder / "patches.safetensors").open("rb") as file:
        batch = post_patches.sync(opened.id, client=client, body=File(payload=file))
    with (folder / "broken.safetensors").open("rb") as file:
        broken = post_patches.sync(opened.id, client=client, body=File(payload=file))
    assert isinstance(sent, Upload) and isinstance(batch, Upload)
    assert isinstance(broken, Problem) and (broken.status, broken.code) == (422, Code.WRONG_SHAPE)
    stale = commit_transaction.sync(opened.id, client=client, if_match='"999"')
    assert isinstance(stale, Problem) and (stale.status, stale.code) == (412, Code.PRECONDITION_FAILED)
    receipt = commit_transaction.sync(opened.id, client=client, if_match=f'"{before.version}"')
    assert isinstance(receipt, Receipt), receipt
    assert [upload.blake3 for upload in receipt.uploads] == [sent.blake3, batch.blake3]
    (folder / "committed").write_bytes(read(client))

    twice = commit_transaction.sync(opened.id, client=client)
    assert isinstance(twice, Problem) and (twice.status, twice.code) == (409, Code.TRANSACTION_STATE)
    missing = commit_transaction.sync("none", client=client)
    assert isinstance(missing, Problem) and (missing.status, missing.code) == (404, Code.UNKNOWN_TRANSACTION)

    back = rollback.sync(client=client, body=RollbackRequest(to_version=before.version))
    assert isinstance(back, Receipt) and back.restores == before.version
    (folder / "after").write_bytes(read(client))


main(sys.argv[1], Path(sys.argv[2]))
