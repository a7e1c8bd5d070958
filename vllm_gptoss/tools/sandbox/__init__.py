"""Isolation for untrusted code: processes in their own namespaces, started from a warm fork server.

What is here: user, mount, pid, network, ipc, uts and cgroup namespaces, a read-only view of one Python prefix, a
private tmpfs with size and inode limits, no_new_privs, no capabilities, a seccomp allowlist, landlock, rlimits, a
memory watchdog. What is not: a virtual machine. The kernel's own system calls stay reachable; docs/security.md has
the consequences.

The order things happen in:

`launcher` (server, asyncio) → `zygote` (caged once, imports numpy and friends, forks) → `cage` (one per conversation:
namespaces, mounts, filters) → `supervisor` (pid 1 of the cage: starts, stops, watches and kills) → the payload.

Everything from `zygote` on runs on the standard library alone and is loaded by path, so that it also runs under another
interpreter than the server's.
"""
