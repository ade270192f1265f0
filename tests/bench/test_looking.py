import ssl

import pytest

from bench.networks import BadNetwork, saying
from shoal.bench.looking import Look, look
from shoal.core import SYSTEM_CLOCK, Address
from shoal.transport.frames import HEADER, MAGIC, VERSION
from shoal.transport.streams.transport import StreamTransport
from shoal.transport.trust.tls import VALID_BEFORE_S
from transport.members import Swarm

LOOPBACK = Address("127.0.0.1", 0)
SHORT_S = 0.3


def look_at(address, secret=None, network=None, patience_s=2.0):
    return look(network or BadNetwork(), address, secret, patience_s=patience_s)


def test_a_peer_without_a_secret_says_its_version(run):
    async def main():
        async with StreamTransport() as peer:
            return await look_at(await peer.listen(LOOPBACK))

    assert run(main()) == Look("open", version=VERSION)


def test_a_peer_of_another_version(run):
    async def main():
        async with saying(HEADER.pack(MAGIC, 77, 1, 0, 0, 0)) as address:
            return await look_at(address)

    assert run(main()).version == 77


@pytest.mark.parametrize("run", ["uvloop", "asyncio"], indirect=True)
def test_the_certificate_of_this_swarm_and_of_another(run):
    ours, theirs = Swarm(), Swarm()

    async def main():
        membership = ours.member()
        async with StreamTransport(membership=membership) as peer:
            address = await peer.listen(LOOPBACK)
            secrets = (ours.secret, theirs.secret, None)
            return [await look_at(address, secret, patience_s=0.5) for secret in secrets]

    looks = run(main())
    shown = [each.certificate for each in looks]
    assert [each.reach for each in looks] == ["open"] * 3
    assert all(each.is_of_shoal for each in shown)
    assert [each.is_of_this_swarm for each in shown] == [True, False, False]
    assert shown[0].made_s == pytest.approx(SYSTEM_CLOCK.wall_s(), abs=60)
    assert shown[0].begins_s == shown[0].made_s - VALID_BEFORE_S


def test_something_else_that_listens(run):
    async def main():
        async with saying(b"SSH-2.0-OpenSSH_9.6\r\n") as talking, saying(b"") as silent:
            return await look_at(talking), await look_at(silent, patience_s=SHORT_S)

    talking, silent = run(main())
    assert talking == Look("open", says=b"SSH-2.0-OpenSSH_9.6\r\n"[: HEADER.size])
    assert silent == Look("open")


@pytest.mark.parametrize(
    ("tcp", "expected"),
    [
        ("dropped", Look("silent")),
        ("refused", Look("refused")),
        ("unroutable", Look("unreachable", "No route to host")),
    ],
)
def test_nobody_is_reached(run, tcp, expected):
    async def main():
        return await look_at(Address("127.0.0.1", 9), None, BadNetwork(tcp=tcp), SHORT_S)

    assert run(main()) == expected


def test_a_name_that_nobody_knows(run):
    found = run(look_at(Address("no-such-host.invalid", 9)))
    assert found.reach == "unknown host"


def test_tls_of_another_program(run, tmp_path):
    """A certificate that no swarm has signed is not taken for one."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "www.example.org")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 7, now, now + datetime.timedelta(days=1))
    ).sign(key, hashes.SHA256())
    chain = tmp_path / "chain.pem"
    chain.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)

    async def main():
        async with saying(b"", context) as address:
            return await look_at(address, Swarm().secret, patience_s=0.5)

    found = run(main())
    assert found.certificate is not None
    assert not found.certificate.is_of_shoal
    assert not found.certificate.is_of_this_swarm
