"""A URL as it may be shown: people put secrets into the user, the password and the query. Pure."""

from __future__ import annotations

import re

# A password may hold anything, so its end is the last @ there is.
_USER = re.compile(r"\A([A-Za-z0-9+.-]*://)?.*@", re.DOTALL)
_REST = re.compile(r"[?#].*", re.DOTALL)


def shown(url: str, max_chars: int = 80) -> str:
    """Also of what is no URL."""
    return _REST.sub("?…", _USER.sub(r"\1…@", url))[:max_chars]


def refuse_user(url: str) -> None:
    """Raises ValueError, whose text does not hold it."""
    if _USER.search(url) is not None:
        raise ValueError("a user or password in a URL is not sent, and would be seen by others")
