"""What host and warm child say to each other, and through which descriptors.

Requests are frames of a SEQPACKET socket, one per call; larger ones lie in a memfd that the frame carries.
Replies are length-prefixed frames of a stream, one per call, in the order of the requests.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from stellwerk.core.run import Failed, Returned, Succeeded

REQUEST_FD, REPLY_FD, STDOUT_READ_FD, STDERR_READ_FD = 3, 4, 5, 6  # in the child; beside 0, 1 and 2
FRAME_BYTES_MAX = 64 * 1024  # a SEQPACKET frame must fit the send buffer, which is 208 KiB for ordinary users
PIPE_BYTES = 64 * 1024  # what a pipe holds: a read of this size empties it in one step
LENGTH_BYTES = 4
REPLY_BYTES_MAX = 16 * 1024 * 1024  # more is no reply: a function wrote into our socket
HELLO = 0  # the serial of a child's first reply: it is ready

EXPIRED = Returned(reason="the lease was over before the call began")
IN_MEMFD = b"\x00"  # a frame that begins so has the serial after it, and the request in the descriptor that came along
SERIAL_BYTES = 8


class Request(Struct, frozen=True, array_like=True):
    """One call. `deadline_boot_ms` is its lease's end: a call read later than that must not begin."""

    serial: int
    function: str
    run_id: str
    number: int
    scope: str
    name: str
    args: bytes | None
    env: Mapping[str, str]
    labels: Mapping[str, str]
    cwd: str | None
    deadline_boot_ms: int


class Reply(Struct, frozen=True, array_like=True):
    """The end of one call with what it wrote. `Returned`: its lease was over, it was not begun.

    `is_leaving`: the child reads no further request and exits, by its own choice.
    """

    serial: int
    outcome: Succeeded | Failed | Returned
    stdout: bytes
    stderr: bytes
    took_us: int
    is_leaving: bool


class ChildSettings(Struct, frozen=True):
    """What a child is told when it starts."""

    import_paths: tuple[str, ...]
    allowed_packages: tuple[str, ...] | None
    temp_folder: str


encode_frame = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def serial_of(frame: bytes) -> int:
    """Which call a request frame is about."""
    if frame[:1] == IN_MEMFD:
        return int.from_bytes(frame[1 : 1 + SERIAL_BYTES], "big")
    return decode_request(frame).serial


def reply_frame(reply: Reply) -> bytes:
    body = encode_frame(reply)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def split_replies(received: bytearray) -> list[Reply]:
    """Take all complete replies off the front of what was received; DecodeError if they are none."""
    replies = []
    start, size = 0, len(received)
    with memoryview(received) as view:
        while start + LENGTH_BYTES <= size:
            length = int.from_bytes(view[start : start + LENGTH_BYTES], "big")
            if length > REPLY_BYTES_MAX:
                raise msgspec.DecodeError(f"a reply of {length} bytes")
            end = start + LENGTH_BYTES + length
            if end > size:
                break
            replies.append(decode_reply(view[start + LENGTH_BYTES : end]))
            start = end
    del received[:start]
    return replies
