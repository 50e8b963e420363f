"""Real servers of stores, for tests: S3 by moto, SFTP by asyncssh, Azure's blobs by Azurite.

The packages are no part of the lock file. They are installed into an environment of their own, on
top of the one that runs the tests. ``MIRROR_PYTHON`` names a Python that has them already.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.environments import make_environment_above

PACKAGES = ["s3fs", "moto[server,s3]", "paramiko", "asyncssh", "adlfs"]
HOST = "127.0.0.1"
# The account that every Azurite has.
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
SFTP_SERVER = """
import asyncio, sys, asyncssh

class AnyUser(asyncssh.SSHServer):
    def begin_auth(self, username):
        return True
    def password_auth_supported(self):
        return True
    def validate_password(self, username, password):
        return True

async def serve():
    port, folder = int(sys.argv[1]), sys.argv[2]
    await asyncssh.listen(
        "127.0.0.1", port, server_factory=AnyUser, reuse_address=True,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=folder.encode()),
    )
    await asyncio.Event().wait()

asyncio.run(serve())
"""


class Server(NamedTuple):
    """A store that is served: where runs are mirrored, and what a process needs to reach it."""

    url: str
    environment: dict[str, str]


@functools.cache
def python_with_stores() -> str:
    """A Python with the packages of all stores. The test is skipped where they cannot be had."""
    named = os.environ.get("MIRROR_PYTHON")
    if named:
        return named
    place = Path(tempfile.mkdtemp(prefix="stores-"))
    python = make_environment_above(place)
    installed = subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=False)
    if installed.returncode:
        shutil.rmtree(place)
        pytest.skip("the packages of the stores cannot be installed here")
    return python


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


@contextmanager
def listening(words: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server that has begun to listen; it ends with the block."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while socket.socket().connect_ex((HOST, port)):
            assert process.poll() is None, words
            assert time.monotonic() < end, words
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def s3(folder: Path) -> Iterator[Server]:
    """Moto's S3 server. It keeps everything in its memory."""
    python = python_with_stores()
    port = free_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{HOST}:{port}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    make = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
    with listening([python, "-m", "moto.server", "-H", HOST, "-p", str(port)], port):
        subprocess.run([python, "-c", make], env={**os.environ, **environment}, check=True)
        yield Server("s3://bucket/runs", environment)


@contextmanager
def sftp(folder: Path, port: int | None = None) -> Iterator[Server]:
    """An SSH server that serves a folder."""
    python = python_with_stores()
    port = port or free_port()
    with listening([python, "-c", SFTP_SERVER, str(port), str(folder)], port):
        yield Server(f"sftp://me:secret@{HOST}:{port}/runs", {})


@contextmanager
def azure(folder: Path) -> Iterator[Server]:
    """Azurite, where it is installed: ``npm install -g azurite``, or ``AZURITE`` names it."""
    program = os.environ.get("AZURITE") or shutil.which("azurite-blob")
    if not program:
        pytest.skip("Azurite is not installed: npm install -g azurite")
    python = python_with_stores()
    port = free_port()
    account = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURITE_KEY}"
    end_point = f"BlobEndpoint=http://{HOST}:{port}/devstoreaccount1;"
    environment = {"AZURE_STORAGE_CONNECTION_STRING": f"{account};{end_point}"}
    words = [program, "--blobHost", HOST, "--blobPort", str(port), "--location", str(folder)]
    make = "import adlfs; adlfs.AzureBlobFileSystem().mkdir('container')"
    with listening([*words, "--silent", "--skipApiVersionCheck"], port):
        subprocess.run([python, "-c", make], env={**os.environ, **environment}, check=True)
        yield Server("az://container/runs", environment)


@contextmanager
def plain_folder(folder: Path) -> Iterator[Server]:
    """A folder, as where a disk is mounted."""
    python_with_stores()
    yield Server(str(folder / "store"), {})


KINDS = {"folder": plain_folder, "s3": s3, "sftp": sftp, "azure": azure}
