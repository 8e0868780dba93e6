"""Checks of the IP addresses that tenants' or operators' URLs lead to.

Without them, a URL could make the platform call its own database, its neighbors or a cloud's metadata service. A
connection uses an address of `checked_addresses` and does not resolve the name again. So a name server that changes its
answer cannot lead a request to an internal service.

The blocks are those of IANA's registries of special-purpose addresses. `ipaddress` is not used for this, because its
answers differ between versions of Python.
"""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_NOT_PUBLIC_IPV4 = tuple(
    IPv4Network(block)
    for block in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by the customers of a provider
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's wire server, which serves virtual machines at an address in a public range
        "169.254.0.0/16",  # link-local
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments, with the anycast addresses that the nearest network answers
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and the broadcast address
    )
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")  # the only IPv6 addresses that IANA assigns to networks
_NOT_PUBLIC_IPV6 = tuple(
    IPv6Network(block)
    for block in (
        "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
)


class UnresolvedHost(Exception):
    """An error of a host name that has no address."""


class InternalHost(Exception):
    """An error of a host of which an address is not public."""


def checked_addresses(host: str, port: int, *, allow_internal: bool) -> list[str]:
    """Return the current IP addresses of a host. The call waits for the name server.

    Raises:
        UnresolvedHost: the name has no address.
        InternalHost: an address is not public, and internal ones are not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise UnresolvedHost(host) from exc
    addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
    if not allow_internal and not all(map(is_public_text, addresses)):
        raise InternalHost(host)
    return addresses


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether the IP address is public. An IPv4 address embedded in an IPv6 address is checked as IPv4."""
    if isinstance(address, IPv4Address):
        return not any(address in block for block in _NOT_PUBLIC_IPV4)
    if address.scope_id:
        return False
    if address in _MAPPED or address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    return address in _GLOBAL_UNICAST and not any(address in block for block in _NOT_PUBLIC_IPV6)


def is_public_text(address: str) -> bool:
    return is_public(ip_address(address))
