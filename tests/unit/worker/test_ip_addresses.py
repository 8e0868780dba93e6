"""Public IP addresses, by IANA's registries of special-purpose addresses."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any

import pytest

from inference_worker.contract.ip_addresses import is_public

# Every entry of the registries "IPv4 Special-Purpose Address" and "IPv6 Special-Purpose Address" (RFC 6890), and of the
# IPv4 and IPv6 address spaces. `True`: all of the block is public.
IPV4 = {
    "0.0.0.0/8": False,
    "0.0.0.0/32": False,
    "10.0.0.0/8": False,
    "100.64.0.0/10": False,
    "127.0.0.0/8": False,
    "168.63.129.16/32": False,  # Azure's, in no registry
    "169.254.0.0/16": False,
    "172.16.0.0/12": False,
    "192.0.0.0/24": False,
    "192.0.0.0/29": False,
    "192.0.0.8/32": False,
    "192.0.0.9/32": False,  # anycast, "globally reachable", but the nearest network answers
    "192.0.0.10/32": False,
    "192.0.0.170/31": False,
    "192.0.2.0/24": False,
    "192.31.196.0/24": True,
    "192.52.193.0/24": True,
    "192.88.99.0/24": False,
    "192.88.99.2/32": False,
    "192.168.0.0/16": False,
    "192.175.48.0/24": True,
    "198.18.0.0/15": False,
    "198.51.100.0/24": False,
    "203.0.113.0/24": False,
    "224.0.0.0/4": False,
    "240.0.0.0/4": False,
    "255.255.255.255/32": False,
}
IPV6 = {
    "::/0": False,  # all that is not assigned
    "::/8": False,
    "::/96": False,  # IPv4-compatible
    "::/128": False,
    "::1/128": False,
    "64:ff9b:1::/48": False,
    "100::/64": False,
    "100:0:0:1::/64": False,
    "200::/7": False,
    "400::/6": False,
    "2000::/3": True,
    "2001::/23": False,
    "2001::/32": False,
    "2001:1::1/128": False,
    "2001:1::2/128": False,
    "2001:1::3/128": False,
    "2001:2::/48": False,
    "2001:3::/32": False,
    "2001:4:112::/48": False,
    "2001:10::/28": False,
    "2001:20::/28": False,
    "2001:30::/28": False,
    "2001:db8::/32": False,
    "2002::/16": False,
    "2620:4f:8000::/48": True,
    "3fff::/20": False,
    "4000::/3": False,
    "5f00::/16": False,
    "e000::/4": False,
    "fc00::/7": False,
    "fe80::/10": False,
    "fec0::/10": False,
    "ff00::/8": False,
}
EMBEDDING = {
    "::ffff:0:0": True,
    "64:ff9b::": True,
    "::": False,
    "2002::": False,
    "64:ff9b:1::": False,
    "64:ff9c::": False,
}


def expected(address: IPv4Address | IPv6Address, entries: dict[str, bool]) -> bool:
    """Return the value of the smallest block with the address."""
    blocks = [ip_network(block) for block in entries]
    found = [block for block in blocks if address in block]
    return entries[str(max(found, key=lambda block: block.prefixlen))] if found else True


def edges(block: Any) -> set[Any]:
    """Return the first and the last address of the block, the middle and the neighbors outside."""
    first, last = block.network_address, block.broadcast_address
    found = {first, last, first + (int(last) - int(first)) // 2}
    found |= {first - 1} if int(first) else set()
    return found | ({last + 1} if int(last) != int(block.max_prefixlen * "1", 2) else set())


@pytest.mark.parametrize("entries", [IPV4, IPV6], ids=["IPv4", "IPv6"])
def test_each_block_of_the_registries(entries: dict[str, bool]) -> None:
    wrong = []
    for text in entries:
        for address in edges(ip_network(text)):
            if address in ip_network("::ffff:0:0/96") or address in ip_network("64:ff9b::/96"):
                continue
            if is_public(address) != expected(address, entries):
                wrong.append(address)
    assert wrong == []


@pytest.mark.parametrize("prefix", EMBEDDING)
def test_embedded_ipv4_addresses_are_checked_as_ipv4(prefix: str) -> None:
    for text in (*IPV4, "8.8.8.8/32", "93.184.215.14/32"):
        for address in edges(ip_network(text)):
            embedded = int(address) << 80 if prefix == "2002::" else int(address)
            found = IPv6Address(int(IPv6Address(prefix)) + embedded)
            assert is_public(found) == (EMBEDDING[prefix] and is_public(address)), found


@pytest.mark.parametrize("text", ["2606:4700::1111%eth0", "fe80::1%2", "::ffff:8.8.8.8%1"])
def test_addresses_with_a_zone_are_not_public(text: str) -> None:
    assert not is_public(ip_address(text))
