"""The python tool as Jupyter kernels: in the fork server's cages, in bubblewrap's, or on the host."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from vllm_gptoss.tools.sandbox.bubblewrap import Bubblewrap
from vllm_gptoss.tools.sandbox.cgroups import CgroupError, Cgroups
from vllm_gptoss.tools.sandbox.host import HostLauncher, HostProcess
from vllm_gptoss.tools.sandbox.launcher import IsolationError, Sandbox, SandboxError, Zygote
from vllm_gptoss.tools.sandbox.spec import Spec

from .client import KernelClient, KernelError
from .options import PythonOptions
from .view import build_view

_PAYLOAD = Path(__file__).with_name("payload.py")
_CONNECT_S = 20.0


async def make_namespaces(options: PythonOptions) -> Zygote:
    """The fork server, with both of its rings tried. Raises SandboxError."""
    zygote = Zygote(await _spec(options), str(options.python), await _cgroups(options))
    try:
        await zygote.start(options.start_timeout_s)
        await _try(zygote)  # the second ring may be forbidden where the first is not
    except SandboxError:
        await zygote.aclose()
        raise
    return zygote


async def make_bubblewrap(options: PythonOptions) -> Bubblewrap:
    """Raises SandboxError."""
    wrapper = Bubblewrap(await _spec(options), str(options.python), await _cgroups(options))
    await wrapper.start(options.start_timeout_s)
    await _try(wrapper)
    return wrapper


async def _try(launcher: Zygote | Bubblewrap) -> None:
    try:
        sandbox = await launcher.spawn()
    except SandboxError as error:
        raise IsolationError(str(error)) from error
    await sandbox.aclose()


async def make_host(options: PythonOptions) -> HostLauncher:
    return HostLauncher(await _spec(options), str(options.python))


async def _spec(options: PythonOptions) -> Spec:
    payload = {
        "preload": list(options.preload),
        "required": list(options.packages),
        # The server truncates for the model; this only keeps a flood out of memory.
        "max_output_chars": max(4 * options.max_output_chars, 1 << 20),
        "max_message_bytes": options.max_message_mib << 20,
    }
    return Spec(await build_view(options), options.limits(), str(_PAYLOAD), payload)


async def _cgroups(options: PythonOptions) -> Cgroups | None:
    try:
        return await asyncio.to_thread(Cgroups, options.cgroup) if options.cgroup else None
    except CgroupError as error:
        raise SandboxError(str(error)) from error


async def connect(options: PythonOptions, sandbox: Sandbox | HostProcess) -> KernelClient:
    """Starts a kernel in a cage that has none (any more). Raises SandboxError."""
    # Names that no program could have guessed, so none can be there already.
    name, key = f"k{secrets.token_hex(12)}", secrets.token_hex(32)
    await sandbox.start({"ip": f"{sandbox.sockets}/{name}", "key": key}, options.start_timeout_s)
    limit = options.max_message_mib << 20
    try:
        return await KernelClient.connect(
            sandbox.directory,
            name,
            key,
            max_message=limit + (1 << 20),
            max_total=8 * limit,
            keep=options.max_output_chars,
            timeout_s=_CONNECT_S,
        )
    except KernelError as error:
        raise SandboxError(str(error)) from error
