"""What looks like a secret is taken out of all that this program prints or writes.

The second line: the first is that no secret reaches the controller. What a secret looks like is AWS's and Hugging
Face's own words: access key ids (IAM's reference of unique identifiers), the names that credentials have in AWS's
configuration, environment and answers, the query of a presigned URL (Signature Version 4, and 2), `hf_` tokens. What
stands before one is not looked at: it may be an escaped line's end.
"""

from __future__ import annotations

import io
import re
from typing import Any, TextIO

MARK = "[redacted]"

# Names before a value; between the two what JSON, YAML, an environment, a header or a query put there, escaped or not.
_NAMES = (
    r"aws[_-]?secret[_-]?access[_-]?key|aws[_-]?session[_-]?token|secret[_-]?access[_-]?key|session[_-]?token"
    r"|security[_-]?token|x-amz-security-token|x-amz-signature|x-amz-credential|x-aws-ec2-metadata-token"
    r"|hf[_-]token|hugging[_-]?face[_-]?hub[_-]?token|authorization"
)
_BETWEEN = r"(?:\\*[\"'])?\s*(?::|=|%3[dD])\s*(?:\\*[\"'])?(?:(?:Bearer|Basic|AWS4-HMAC-SHA256)\s+)?"
_SECRETS = re.compile(
    # A value after its name goes up to what ends it in any of these forms; a short word is no credential.
    rf"(?P<named>(?i:{_NAMES}){_BETWEEN})(?P<value>[^\s\"'\\&,;<>{{}}]{{8,}})"
    # With names too common to be taken elsewhere than in a query; a signature also in a header.
    r"|(?P<query>[?&](?:Signature|AWSAccessKeyId|Token)=|[\s,]Signature=)(?P<queried>[^\s\"'\\&<>]{8,})"
    # `hf_`, also in base64 where it begins a text.
    r"|(?P<hub>hf(?:_|%5[fF])[A-Za-z0-9]{16,}|aGZf[A-Za-z0-9+/]{20,}={0,2})"
    r"|(?P<key_id>A[KS]IA[A-Z0-9]{16})"
    # Session tokens begin with one of these.
    r"|(?P<session>(?:IQoJb3JpZ2lu|F[wQ]oGZXIvYXdz)[A-Za-z0-9+/%=]{20,})"
    r"|(?P<private>-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"(?:[^\"']*?-----END [A-Z ]*PRIVATE KEY-----|(?:[A-Za-z0-9+/=\s]|\\[nr])*))"
)


def redacted(text: str) -> str:
    """The text, with a mark for what looks like a secret; what does not is returned as it is."""
    return _SECRETS.sub(lambda found: (found["named"] or found["query"] or "") + MARK, text)


def redacted_data(data: Any) -> Any:
    """The same for every text in lists and mappings, keys too; other values stay."""
    if isinstance(data, str):
        return redacted(data)
    if isinstance(data, dict):
        return {redacted_data(key): redacted_data(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(redacted_data(item) for item in data)
    return data


class RedactedStream(io.TextIOWrapper):
    """A text stream over another one's bytes that lets nothing through that looks like a secret."""

    def write(self, text: str, /) -> int:
        """Writes what may be shown; returns how much of the text was taken, which is all of it."""
        super().write(redacted(text))
        return len(text)

    @classmethod
    def over(cls, stream: TextIO) -> TextIO:
        """The stream, redacted; a character that it lacks is replaced. One without bytes stays what it is."""
        if not isinstance(stream, io.TextIOWrapper):
            return stream
        stream.flush()
        return cls(
            stream.buffer, encoding=stream.encoding, errors="replace",
            line_buffering=stream.line_buffering, write_through=stream.write_through,
        )  # fmt: skip
