"""IP addresses and networks that may use an API key. Does not import Django."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from inference_worker.contract.texts import Text


def normalize_networks(networks: Iterable[str]) -> tuple[str, ...]:
    """Return addresses and networks as CIDR without duplicates, in the given order.

    Raises:
        ValueError: the message names the text that is neither an address nor a network.
    """
    return tuple(dict.fromkeys(str(_read_network(text.strip())) for text in networks))


def _read_network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text, strict=False)
    except ValueError as exc:
        message = Text("%(value)s does not appear to be an IPv4 or IPv6 network", value=repr(text))
        raise ValueError(message) from exc


def is_allowed(address: str | None, networks: Sequence[str] | None) -> bool:
    """Return whether an IP address is in one of the networks. If `networks` is None, all addresses are allowed.

    An IPv4-mapped IPv6 address counts as the IPv4 address. A missing or invalid address is in no network.
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
    """Return the network that limits per IP address apply to: an IPv4 address, or the /64 network of an IPv6 address.

    A host or customer usually has a /64. Invalid addresses are returned unchanged.
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
