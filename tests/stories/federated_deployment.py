"""A Flower app, a SuperLink and SuperNodes as processes of this machine, joined by TLS: what an operator would start."""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

APP = """
import json
import os

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from hushgrad import noise
from hushgrad.federated import DPFTRL, MinSeparation, ServerSGD, clip_update
from hushgrad.train import Plan

CLIENTS, ROUNDS = 3, 2
server = ServerApp()


def spoil(message, context, call_next):
    reply = call_next(message, context)
    if context.node_config["partition-id"] == 0:  # a client that does not obey: what it sends has seen no mod of ours
        reply.content["arrays"] = ArrayRecord({"w": Array("float64", (5,), "numpy.ndarray", b"PK garbage")})
    return reply


client = ClientApp(mods=[spoil, clip_update])


def plan():
    sampling = MinSeparation(cohort=CLIENTS, gap=1, times=ROUNDS, steps=ROUNDS)
    options = {"delta": 1e-5, "batch_size": CLIENTS, "dataset_size": CLIENTS, "unit": "user", "max_grad_norm": 0.5}
    return Plan.dpftrl(noise_multiplier=1.0, sampling=sampling, noise=noise.BLT(buffers=2), **options)


@client.train()
def train(message, context):
    array = message.content["arrays"]["w"].numpy() + 1 + context.node_config["partition-id"]
    return Message(RecordDict({"arrays": ArrayRecord({"w": Array(array)})}), reply_to=message)


def trained(grid, directory=None):
    strategy = DPFTRL(FedAvg(min_available_nodes=CLIENTS), plan(), server=ServerSGD(momentum=0.5), seed=0, directory=directory)
    result = strategy.start(grid, ArrayRecord({"w": Array(np.zeros(5))}), timeout=400)
    return strategy, result.arrays["w"].numpy()


@server.main()
def main(grid, context):
    strategy, weights = trained(grid, os.environ["HUSHGRAD_TEST_OUT"] + "/run")
    found = {
        "weights": weights.tolist(),
        "rounds": strategy.rounds,
        "accepted": strategy.raw_round.accepted,
        "rejected": strategy.raw_round.rejected,
        "epsilon": strategy.spent().epsilon,
    }
    with open(os.environ["HUSHGRAD_TEST_OUT"] + "/found.json", "w") as file:
        json.dump(found, file)
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "story"
version = "1.0.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "hushgrad"

[tool.flwr.app.components]
serverapp = "story.app:server"
clientapp = "story.app:client"

[tool.flwr.app.config]
"""


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """(authority, certificate, key) for this machine's own address, valid for a day."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def signed(name, key, issuer, by, *, authority):
        now = datetime.datetime.now(datetime.timezone.utc)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
        other = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only".split()
        usage = x509.KeyUsage(digital_signature=True, key_cert_sign=authority, crl_sign=authority, **dict.fromkeys(other, False))
        builder = builder.add_extension(usage, critical=True)
        return builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(by, hashes.SHA256())

    def named(text):
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    ours, theirs = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = signed(named("story"), ours, named("story"), ours, authority=True)
    leaf = signed(named("localhost"), theirs, named("story"), ours, authority=False)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    contents = {
        "ca.pem": root.public_bytes(pem),
        "server.pem": leaf.public_bytes(pem),
        "server.key": theirs.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder / "ca.pem", folder / "server.pem", folder / "server.key"


def ports(count: int) -> list[int]:
    """Free ones that the system gives to nobody who does not ask for them by number; each process begins at its own."""
    found: list[int] = []
    for port in range(20_000 + os.getpid() * 37 % 10_000, 32_000):
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            break
    return found


def deployed(folder: Path, *, clients: int, seconds: float) -> str:
    """Run the app on a deployment; returns what was logged. Its outcome is in ``folder``/found.json."""
    app = folder / "story"
    (app / "story").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "story" / "__init__.py").touch()
    (app / "story" / "app.py").write_text(APP)
    home = folder / "home"
    home.mkdir()
    authority, certificate, key = certificates(folder)
    link, *nodes = ports(1 + clients)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "localhost:{link}"\nroot-certificates = "{authority}"\n'
    )
    environment = {**os.environ, "FLWR_HOME": str(home), "HUSHGRAD_TEST_OUT": str(folder), "OMP_NUM_THREADS": "1"}
    environment |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    environment["PATH"] = str(Path(sys.executable).parent) + os.pathsep + environment["PATH"]
    tls = ["--ssl-ca-certfile", str(authority), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    log, running = (folder / "log.txt").open("w+"), []

    def start(*words: str) -> subprocess.Popen:
        running.append(subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
        return running[-1]

    try:
        start("flower-superlink", *tls, "--port", str(link), "--disable-runtime-dependency-installation")
        for number, port in enumerate(nodes):
            config = f"partition-id={number} num-partitions={clients}"
            where = ["--superlink", f"localhost:{link}", "--root-certificates", str(authority), "--port", str(port)]
            start("flower-supernode", *where, *tls, "--node-config", config)
        until = time.monotonic() + seconds
        while time.monotonic() < until and not (folder / "found.json").exists():
            if len(running) == 1 + clients or running[-1].poll() not in (None, 0):  # the link may not listen yet
                time.sleep(2)
                start("flwr", "run", str(app), "here")
            time.sleep(0.5)
    finally:
        for process in reversed(running):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    log.seek(0)
    return log.read()
