"""A reference to something in the object store. Never a presigned URL: those would be secrets on a topic."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from schemas.fields import Asked, Count, Sha256, Time, Written

Bucket = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")]
Key = Annotated[str, Field(min_length=1, max_length=1024)]

# What stores refuse, alter or take for a path: empty segments, backslashes, control characters.
_SEGMENT = r"[^/\\\x00-\x1f\x7f-\x9f]+"
PLAIN_KEY = rf"^{_SEGMENT}(?:/{_SEGMENT})*$"
_PLAIN_KEY = re.compile(PLAIN_KEY[1:-1])
KEY_BYTES = 1024  # S3's limit, in UTF-8


def _plain(key: str) -> str:
    segments = key.split("/")
    if _PLAIN_KEY.fullmatch(key) is None or "." in segments or ".." in segments or len(key.encode()) > KEY_BYTES:
        raise ValueError(
            "must be a plain key: no control characters, backslashes, empty segments, . or .. between slashes, "
            f"and at most {KEY_BYTES} bytes"
        )
    return key


PlainKey = Annotated[Key, AfterValidator(_plain), Field(json_schema_extra={"pattern": PLAIN_KEY})]


class BlobRef(Written):
    """Where a stored output lies; the blob is the whole response object. Check `size` and `sha256` after fetching."""

    bucket: Bucket
    key: Key
    size: Count = Field(description="bytes")
    sha256: Sha256 = Field(description="of the stored bytes, hex")
    content_type: str = "application/json"
    etag: str | None = None
    version_id: str | None = None
    expires_at: Time | None = Field(default=None, description="when the store may delete it")


class InputRef(Asked):
    """Where a claim-checked request body lies. `etag`, `version_id` and `expires_at` are accepted, so that a reference
    written by the service can be passed on as it is; size and digest decide."""

    bucket: Bucket
    key: PlainKey
    size: Count = Field(description="bytes")
    sha256: Sha256 = Field(description="of the stored bytes, hex")
    content_type: str = "application/json"
    etag: str | None = None
    version_id: str | None = None
    expires_at: Time | None = None
