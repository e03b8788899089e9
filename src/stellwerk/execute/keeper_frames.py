"""What host and keeper say to each other: orders down, reports up, in length-prefixed msgpack frames.

File descriptors travel beside the bytes (SCM_RIGHTS), in the order of the START orders they belong to. Texts for the
system (argv, environment, folder) are bytes: what the operating system hands out need not be UTF-8.
"""

from __future__ import annotations

import struct

import msgspec
from msgspec import Struct

FRAME_BYTES_MAX = 32 * 1024 * 1024  # argv and environment of one START; the kernel refuses far less
FDS_PER_START_MAX = 200  # the kernel takes 253 in one message
FRAME_HEAD = struct.Struct("!I")


class Start(Struct, frozen=True, array_like=True, tag="start"):
    """Spawn this. The deadline is required: a default of "never" would defeat the lease."""

    handle: int
    argv: list[bytes]
    env: dict[bytes, bytes]
    cwd: bytes
    deadline_boot_ms: int
    fd_count: int


class Renew(Struct, frozen=True, array_like=True, tag="renew"):
    """A tree's deadline is the later of its own and this one; what has expired by then stays expired."""

    deadline_boot_ms: int


class Move(Struct, frozen=True, array_like=True, tag="move"):
    """A new deadline of its own for one tree, earlier or later; it does not revive either."""

    handle: int
    deadline_boot_ms: int


class Stop(Struct, frozen=True, array_like=True, tag="stop"):
    """TERM, then KILL after the grace; 0 kills at once, also in the middle of an earlier grace."""

    handle: int
    grace_ms: int


class Ping(Struct, frozen=True, array_like=True, tag="ping"):
    """Are you there?"""


class Quit(Struct, frozen=True, array_like=True, tag="quit"):
    """Kill everything, then exit with 0."""


Order = Start | Renew | Move | Stop | Ping | Quit


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """The keeper is ready. `abilities` says what this machine allows."""

    pid: int
    abilities: dict[str, str]


class Pong(Struct, frozen=True, array_like=True, tag="pong"):
    """I am here."""


class Started(Struct, frozen=True, array_like=True, tag="started"):
    """The root of the tree runs."""

    handle: int
    pid: int


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """Nothing was started, and why."""

    handle: int
    errno: int
    text: str


class Gone(Struct, frozen=True, array_like=True, tag="gone"):
    """The whole tree is gone. `why` is exit, stop or deadline."""

    handle: int
    wait_status: int
    why: str
    cpu_ms: int
    passes: int


class Stuck(Struct, frozen=True, array_like=True, tag="stuck"):
    """Some of the tree do not die; said again while it lasts."""

    handle: int
    text: str


Report = Hello | Pong | Started | Refused | Gone | Stuck

_encoder = msgspec.msgpack.Encoder()
_order_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_report_decoder = msgspec.msgpack.Decoder(list[Report])


def encode_order(order: Order) -> bytes:
    """One order as a frame."""
    body = _encoder.encode(order)
    return FRAME_HEAD.pack(len(body)) + body


def encode_reports(reports: list[Report]) -> bytes:
    """All reports of one turn as one frame."""
    body = _encoder.encode(reports)
    return FRAME_HEAD.pack(len(body)) + body


def take_frames(received: bytearray) -> list[bytes]:
    """Cut all complete frames off the front of what was received."""
    frames = []
    at = 0
    while len(received) - at >= FRAME_HEAD.size:
        (size,) = FRAME_HEAD.unpack_from(received, at)
        if size > FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {size} bytes is larger than {FRAME_BYTES_MAX}: the channel is broken")
        begin = at + FRAME_HEAD.size
        if len(received) - begin < size:
            break
        frames.append(bytes(received[begin : begin + size]))
        at = begin + size
    del received[:at]
    return frames


def decode_order(frame: bytes) -> Order:
    """What the host wants."""
    return _order_decoder.decode(frame)


def decode_reports(frame: bytes) -> list[Report]:
    """What the keeper says."""
    return _report_decoder.decode(frame)
