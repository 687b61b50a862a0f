"""Messages of Session Manager's data channel: the agent's binary form, big-endian, 120 bytes before the payload."""

from __future__ import annotations

import hashlib
import json
import struct
import time
import uuid
from dataclasses import dataclass, field

OUTPUT, INPUT, ACKNOWLEDGE, CLOSED = "output_stream_data", "input_stream_data", "acknowledge", "channel_closed"
BYTES, SIZE, HANDSHAKE, HANDSHAKE_ANSWER, HANDSHAKE_OVER = 1, 3, 5, 6, 7
_FORM = struct.Struct(">I32sIQQQ16s32sII")
_HEADER = 116


@dataclass(frozen=True, slots=True)
class Message:
    """One message; the sequence number counts each side's stream messages from 0."""

    kind: str
    payload: bytes
    sequence: int = 0
    payload_type: int = 0
    flags: int = 0
    id: uuid.UUID = field(default_factory=uuid.uuid4)

    def packed(self) -> bytes:
        """As it travels. The id's halves are swapped there."""
        swapped = self.id.bytes[8:] + self.id.bytes[:8]
        digest = hashlib.sha256(self.payload).digest()
        head = _FORM.pack(
            _HEADER, self.kind.encode().ljust(32), 1, int(time.time() * 1000), self.sequence, self.flags,
            swapped, digest, self.payload_type, len(self.payload),
        )  # fmt: skip
        return head + self.payload

    def acknowledged(self) -> bytes:
        """The acknowledgement of this message, as it travels."""
        said = {
            "AcknowledgedMessageType": self.kind,
            "AcknowledgedMessageId": str(self.id),
            "AcknowledgedMessageSequenceNumber": self.sequence,
            "IsSequentialMessage": True,
        }
        return Message(ACKNOWLEDGE, json.dumps(said).encode(), flags=3).packed()


def unpacked(data: bytes) -> Message:
    """The message that travelled; ValueError where its payload is not what its digest says."""
    header, kind, _, _, sequence, flags, swapped, digest, payload_type, length = _FORM.unpack_from(data)
    payload = data[header + 4 : header + 4 + length]
    if hashlib.sha256(payload).digest() != digest:
        raise ValueError("payload and digest differ")
    named = uuid.UUID(bytes=swapped[8:] + swapped[:8])
    return Message(kind.rstrip(b" \0").decode(), payload, sequence, payload_type, flags, named)
