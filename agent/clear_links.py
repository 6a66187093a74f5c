"""Says which links out of this machine are not encrypted. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def clear_links(links: Iterable[tuple[str, str]]) -> list[str]:
    """`links`: scheme and host of each. A line for each host that others on the way can listen
    to."""
    hosts = {host for scheme, host in links if scheme == "http" and not is_loopback(host)}
    return [
        f"{host} is spoken to without TLS: what goes there can be read on the way; use https://"
        for host in sorted(hosts)
    ]
