"""Networks a key may be used from. Free of Django."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network


def normalized(networks: Iterable[str]) -> tuple[str, ...]:
    """Addresses and networks as CIDR, each once, in the order given.

    Raises:
        ValueError: naming what is neither.
    """
    return tuple(dict.fromkeys(str(ip_network(text.strip(), strict=False)) for text in networks))


def allowed(address: str | None, networks: Sequence[str] | None) -> bool:
    """Whether `address` lies in one of the networks; None: any may. An IPv4 address in IPv6's clothes counts as itself.

    An address that is unknown or unreadable lies in none.
    """
    if networks is None:
        return True
    try:
        parsed = ip_address(address or "")
    except ValueError:
        return False
    forms = {parsed, getattr(parsed, "ipv4_mapped", None) or parsed}
    return any(form in network for network in map(_network, networks) for form in forms)


@lru_cache(maxsize=4096)
def client_network(address: str) -> str:
    """Name the client that limits per address apply to: an IPv4 address, or an IPv6 address's /64 network.

    A host or a customer is given a /64. Text that is no address is returned as it is.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return address[:64]
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ip_network((parsed.packed[:8] + bytes(8), 64)))


@lru_cache(maxsize=4096)
def _network(text: str) -> IPv4Network | IPv6Network:
    return ip_network(text)
