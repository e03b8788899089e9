"""Probes: is the system as a `Check` asks? Quick looks that never block the loop for long and never raise."""

from __future__ import annotations

import asyncio
import os

from stellwerk.core.errors import Refused
from stellwerk.core.run import Check
from stellwerk.core.times import parse_time

PORT_TIMEOUT_S = 1.0


async def probe(check: Check, now_ms: int) -> bool:
    """Whether the condition holds now. What cannot be found out does not hold."""
    try:
        match check.kind:
            case "until":
                return parse_time(check.value, "until") <= now_ms
            case "file":
                return await asyncio.to_thread(os.path.exists, check.value)
            case "port":
                return await _port_answers(check.value)
            case "load_below":
                return os.getloadavg()[0] < float(check.value)
            case "memory_above":
                return _memory_available() > float(check.value)
    except (OSError, ValueError, Refused):
        return False


async def _port_answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(PORT_TIMEOUT_S):
        _, writer = await asyncio.open_connection(host.strip("[]") or "127.0.0.1", int(port))
    writer.close()
    return True


def _memory_available() -> int:
    """Bytes that a new process could have, as the kernel estimates it."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
