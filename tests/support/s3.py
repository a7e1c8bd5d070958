"""An S3-compatible store of a test's own (moto), where that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from tests.support.sockets import listening

IS_HERE = bool(find_spec("moto") and find_spec("s3fs"))
NEEDS_S3 = pytest.mark.skipif(not IS_HERE, reason="moto and s3fs are in the group `test` and the extra `s3`")


@contextmanager
def storage() -> Iterator[str]:
    """The URL of a fresh bucket; processes started meanwhile find it by their environment."""
    import boto3

    with listening() as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    before = dict(os.environ)
    os.environ.update(
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
    )
    try:
        client, began = boto3.client("s3"), time.monotonic()
        while True:
            try:
                client.create_bucket(Bucket="files")
                break
            except Exception:
                assert process.poll() is None
                assert time.monotonic() - began < 60
                time.sleep(0.2)
        yield "s3://files"
    finally:
        os.environ.clear()
        os.environ.update(before)
        process.kill()
        process.wait()
