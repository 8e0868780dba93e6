"""Webhook targets: only public addresses are reached, whatever the host's name, and calls have a time limit."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
import time
from http.server import ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from inference_worker.contract import ip_addresses
from inference_worker.contract.ip_addresses import InternalHost, is_public
from tenants.webhooks import posting, targets
from tenants.webhooks.posting import post
from tenants.webhooks.targets import TargetRefused, addresses, check_url, parse
from tests.support.tenants.webhook_receiver import receiving

INSIDE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200", "168.63.129.16"),
    *("0.0.0.0", "224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1"),  # noqa: S104
    *("::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "fec0::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:4136:e378::1"),
    *("64:ff9b:1::1", "::127.0.0.1"),
]


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Answer each name lookup with the next list, and return the list of names that were looked up."""
    asked: list[str] = []
    left = list(answers)

    def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        asked.append(host)
        found = left.pop(0) if len(left) > 1 else left[0]
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    resolver = SimpleNamespace(SOCK_STREAM=socket.SOCK_STREAM, getaddrinfo=look_up)
    monkeypatch.setattr(ip_addresses, "socket", resolver)
    return asked


@pytest.mark.parametrize("address", INSIDE)
def test_internal_addresses_are_not_public(address):
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_external_addresses_are_public(address):
    assert is_public(ip_address(address))


@pytest.mark.parametrize("address", INSIDE)
def test_a_name_of_an_internal_address_is_rejected(monkeypatch, address):
    resolving(monkeypatch, ["93.184.215.14", address])
    with pytest.raises(TargetRefused):
        addresses(parse("https://hooks.example/", ()), ())


@pytest.mark.parametrize("host", ["127.1", "0x7f000001", "017700000001", "2130706433", "[::ffff:10.0.0.1]", "0"])
def test_unusual_forms_of_addresses_are_recognized(host):
    with pytest.raises(TargetRefused):
        parse(f"https://{host}/", ())


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST", "localhost.", "a.localhost", "localhost.localdomain", "ip6-localhost"),
        *("127.0.0.1.", "10.0.0.1", "0x7f.1", "0", "[::1]", "[fe80::1%25eth0]", "169.254.169.254", "[::ffff:7f00:1]"),
    ],
)
def test_an_internal_host_name_is_rejected_without_a_lookup(monkeypatch, host):
    asked = resolving(monkeypatch, ["93.184.215.14"])
    with pytest.raises(TargetRefused, match="is internal"):
        check_url(f"https://{host}/", ())
    assert asked == []


@pytest.mark.parametrize("address", INSIDE)
def test_a_name_of_an_internal_address_is_rejected_when_the_url_is_set(monkeypatch, address):
    resolving(monkeypatch, ["93.184.215.14", address])
    with pytest.raises(TargetRefused, match=r"hooks\.example has an internal address"):
        check_url("https://hooks.example/", ())


def test_names_that_are_public_or_do_not_resolve_are_accepted(monkeypatch):
    resolving(monkeypatch, ["93.184.215.14", "2606:4700::1111"], [])
    assert check_url("https://hooks.example/", ()) == "https://hooks.example/"
    assert check_url("https://hooks.example/", ()) == "https://hooks.example/"
    with pytest.raises(TargetRefused, match="no address"):  # delivery checks again
        addresses(parse("https://hooks.example/", ()), ())


def test_an_allowed_host_is_not_looked_up(monkeypatch):
    asked = resolving(monkeypatch, ["10.0.0.1"])
    check_url("http://hooks.internal/", ("hooks.internal",))
    check_url("https://localhost/", ("localhost",))
    assert asked == []


def test_a_silent_name_server_delays_calls_only_shortly(monkeypatch):
    """More lookups hang than can run, but each call returns in time without another thread."""
    answered = threading.Event()
    monkeypatch.setattr(targets, "_lookups", threading.BoundedSemaphore(2))

    def look_up(host: str, port: int, **_: object) -> list[str]:
        assert answered.wait(60)
        raise InternalHost(host)

    monkeypatch.setattr(targets, "checked_addresses", look_up)
    for _ in range(5):
        check_url("https://slow.example/", (), seconds=0.05)
    assert sum(thread.name == "webhook-lookup" for thread in threading.enumerate()) == 2
    answered.set()
    with pytest.raises(TargetRefused):
        check_url("https://slow.example/", (), seconds=30)


def test_only_allowed_hosts_can_have_internal_addresses():
    assert parse("http://hooks.internal:8080/a?b", ("hooks.internal",)) == (False, "hooks.internal", 8080, "/a?b")
    with pytest.raises(TargetRefused):
        parse("http://hooks.internal:8080/", ("other.internal",))


def test_a_name_is_looked_up_once(monkeypatch):
    """A name that is public at the check and internal at the call does not reach the internal address."""
    asked = resolving(monkeypatch, ["192.0.2.77"], ["127.0.0.1"])
    monkeypatch.setattr(ip_addresses, "is_public_text", lambda address: address == "192.0.2.77")
    tried: list[str] = []

    class Dialler:
        SHUT_RDWR, socket = socket.SHUT_RDWR, socket.socket

        @staticmethod
        def create_connection(address: tuple[str, int], timeout: float) -> socket.socket:
            tried.append(address[0])
            raise OSError(113, "No route to host")

    monkeypatch.setattr(posting, "socket", Dialler)
    answer = post("https://rebinding.example/", {}, b"")
    assert answer.error == "The connection failed: No route to host."
    assert (asked, tried) == (["rebinding.example"], ["192.0.2.77"])


def test_a_name_without_an_address_is_an_error(monkeypatch):
    resolving(monkeypatch, [])
    assert post("https://nowhere.example/", {}, b"").error == "The host's name has no address."


def test_the_whole_response_has_a_time_limit():
    """Each byte comes in time, but with a timeout per byte the response would take minutes."""
    with receiving() as (receiver, port):
        receiver.drip = 0.05
        began = time.monotonic()
        answer = post(f"http://127.0.0.1:{port}/", {}, b"{}", private_hosts=("127.0.0.1",), seconds=1)
        assert time.monotonic() - began < 8
    assert (answer.status, answer.error) == (None, "The endpoint did not respond in time.")


def test_only_the_stored_part_of_a_response_is_read():
    with receiving() as (receiver, port):
        receiver.answer = b"z" * 50_000_000
        answer = post(f"http://127.0.0.1:{port}/", {}, b"{}", private_hosts=("127.0.0.1",))
    assert answer.excerpt == "z" * 1024


@pytest.mark.parametrize(("name", "error"), [("hooks.test", ""), ("wrong.test", "The certificate is not valid")])
def test_certificates_must_match_the_host_name(monkeypatch, tmp_path, name, error):
    """The connection uses an address that was looked up before, but the certificate must match the host's name."""
    pem = certificate(tmp_path, name)
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    resolving(monkeypatch, ["127.0.0.1"])

    def over_tls(server: ThreadingHTTPServer) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        server.socket = context.wrap_socket(server.socket, server_side=True)

    with receiving(wrap=over_tls) as (receiver, port):
        answer = post(f"https://hooks.test:{port}/", {}, b"{}", private_hosts=("hooks.test",))
        assert answer.error.startswith(error)
        assert answer.is_success is (error == "")
        assert len(receiver.received) == (error == "")


def certificate(folder: Path, name: str) -> Path:
    """Create a certificate of this host and its key in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "both.pem"
    path.write_bytes(text + made.public_bytes(serialization.Encoding.PEM))
    return path
