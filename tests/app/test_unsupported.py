"""What the engine cannot update is refused before its body, with the reason."""

import asyncio
import json
from pathlib import Path

import pytest

from schemas.model import Treatment
from tests.app.sockets import OCTET_LINE, head, send, served
from tests.fakes.admin import OCTETS, Admin, code, expert_body, expert_parts, running
from tests.fakes.engine import FakeEngine
from tests.fakes.safetensors import body

pytestmark = pytest.mark.anyio
STACKS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def engine(*unsupported: str) -> FakeEngine:
    """An engine on which these tensors of layer 0's experts cannot be updated."""
    made = FakeEngine()
    for name in unsupported:
        made.alter(
            f"model.layers.0.mlp.experts.{name}", treatment=Treatment.UNSUPPORTED, reason=f"{name} is stuck"
        )
    return made


async def asked(admin: Admin, port: int, path: str) -> bytes:
    """What comes back for the head of a request alone that waits for `100 Continue`."""
    size = f"Content-Length: {len(expert_body())}"
    reader, writer = await send(port, head("PUT", path, OCTET_LINE, size, "Expect: 100-continue"))
    first = await asyncio.wait_for(reader.readline(), 5)
    if first.startswith(b"HTTP/1.1 100"):
        writer.close()
        return first
    answer = first + await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


@pytest.mark.parametrize("unsupported", [STACKS, ("down_proj",)])
@pytest.mark.parametrize("path", ["{t}/experts/0/1", "/v1/experts/0/1"])
async def test_an_unsupported_expert_is_refused_unread(
    tmp_path: Path, unsupported: tuple[str, ...], path: str
) -> None:
    """No 100 is sent, the connection ends, and each tensor that is in the way is named with its reason."""
    async with running(tmp_path, engine=engine(*unsupported)) as admin, served(admin) as port:
        answer = await asked(admin, port, path.format(t=await admin.open()))
        assert answer.startswith(b"HTTP/1.1 422") and b"connection: close" in answer.lower()
        document = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert document["code"] == "tensor_unsupported"
        assert {fault["name"]: fault["reason"] for fault in document["errors"]} == {
            name: f"{name} is stuck" for name in unsupported
        }
        assert (await asked(admin, port, path.format(t=await admin.open()).replace("/0/", "/1/"))).startswith(
            b"HTTP/1.1 100"
        )


async def test_the_rest_of_an_expert_can_be_sent(tmp_path: Path) -> None:
    """With `?partial=true` the body is wanted; what it may not hold is refused once its names are known."""
    async with running(tmp_path, engine=engine("down_proj")) as admin, served(admin) as port:
        target = f"{await admin.open()}/experts/0/1?partial=true"
        assert (await asked(admin, port, target)).startswith(b"HTTP/1.1 100")
        parts = expert_parts(1)
        stuck = await admin.http.put(target, content=body(parts), headers=OCTETS)
        assert (stuck.status_code, code(stuck)) == (422, "tensor_unsupported")
        del parts["down_proj"]
        taken = await admin.http.put(target, content=body(parts), headers=OCTETS)
        assert (taken.status_code, taken.json()["tensors"]) == (200, 3)


async def test_nothing_of_an_expert_can_be_sent(tmp_path: Path) -> None:
    """Where every tensor of it is unsupported, a part is refused unread too."""
    async with running(tmp_path, engine=engine(*STACKS)) as admin, served(admin) as port:
        answer = await asked(admin, port, f"{await admin.open()}/experts/0/1?partial=true")
        assert answer.startswith(b"HTTP/1.1 422") and b"tensor_unsupported" in answer
