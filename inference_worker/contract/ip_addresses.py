"""Checks of IP addresses that tenants' or operators' URLs lead to."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

_NAT64 = IPv6Network("64:ff9b::/96")
# Azure's wire server serves virtual machines at an address in a public range.
_METADATA = frozenset({ip_address("168.63.129.16")})


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether the IP address is public. An IPv4 address embedded in an IPv6 address is checked as IPv4."""
    if isinstance(address, IPv6Address):
        if address.scope_id or address.is_site_local or (address.teredo or address.sixtofour):
            return False
        if address.ipv4_mapped or address in _NAT64:
            return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    return address.is_global and not (address.is_multicast or address.is_reserved or address in _METADATA)


def is_public_text(address: str) -> bool:
    return is_public(ip_address(address))
