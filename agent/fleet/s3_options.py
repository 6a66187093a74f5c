"""The options that every command takes that opens a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dsagent.agent.settings import named_path, option

S3Endpoint = Annotated[
    str | None,
    option(
        metavar="URL",
        help="Of the service of an s3:// store, such as https://objects.example.com; "
        "AWS_ENDPOINT_URL says the same.",
    ),
]
S3CaFile = Annotated[
    Path | None,
    option(metavar="FILE", parser=named_path, help="Whom to trust at an s3:// store (PEM)."),
]
