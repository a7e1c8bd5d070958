"""System calls that confined code may make: name → (x86_64, aarch64) number; None where the architecture lacks it.

Everything else is refused, which leaves out by construction: namespaces (unshare, setns, clone3), mounts, ptrace and
process_vm_*, kcmp, keyctl, bpf, perf_event_open, userfaultfd, io_uring_*, modules, kexec, open_by_handle_at, fanotify,
quotactl, SysV and POSIX queues and shared memory (no memory limit sees them), memfd (same), sched_setaffinity (it
limits the number of CPUs), inotify (one user has 128 instances for all its conversations, and each would see what the
others open of the files that they share). Numbers: Linux' arch/x86/entry/syscalls/syscall_64.tbl and
asm-generic/unistd.h.
"""

from __future__ import annotations


def _numbers(table: str) -> dict[str, tuple[int | None, int | None]]:
    """`name x86_64 aarch64`, separated by commas; `-` is None."""
    rows = (entry.split() for entry in table.split(","))
    return {name: (_number(intel), _number(arm)) for name, intel, arm in rows}


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


ALLOWED = _numbers("""
    read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222,
    mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
    pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124,
    mremap 25 216, msync 26 227, mincore 27 232, madvise 28 233, dup 32 23, dup2 33 -, pause 34 -, nanosleep 35 101,
    getitimer 36 102, alarm 37 -, setitimer 38 103, getpid 39 172, sendfile 40 71, connect 42 203, accept 43 202,
    sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48 210, bind 49 200, listen 50 201,
    getsockname 51 204, getpeername 52 205, setsockopt 54 208, getsockopt 55 209, fork 57 -, vfork 58 -, execve 59 221,
    exit 60 93, wait4 61 260, kill 62 129, uname 63 160, flock 73 32, fsync 74 82, fdatasync 75 83, truncate 76 45,
    ftruncate 77 46, getdents 78 -, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, mkdir 83 -, rmdir 84 -,
    creat 85 -, link 86 -, unlink 87 -, symlink 88 -, readlink 89 -, chmod 90 -, fchmod 91 52, chown 92 -, fchown 93 55,
    lchown 94 -, umask 95 166, gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153,
    getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177, setpgid 109 154, getppid 110 173, getpgrp 111 -,
    setsid 112 157, getgroups 115 158, getresuid 118 148, getresgid 120 150, getpgid 121 155, getsid 124 156,
    rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigqueueinfo 129 138, rt_sigsuspend 130 133, sigaltstack 131 132,
    utime 132 -, mknod 133 -, statfs 137 43, fstatfs 138 44, getpriority 140 141, sched_getparam 143 121,
    sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
    sched_rr_get_interval 148 127, mlock 149 228, munlock 150 229, arch_prctl 158 -, sync 162 81, gettid 186 178,
    readahead 187 213, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12,
    flistxattr 196 13, time 201 -, futex 202 98, sched_getaffinity 204 123, epoll_create 213 -, getdents64 217 61,
    set_tid_address 218 96, restart_syscall 219 128, fadvise64 221 223, timer_create 222 107, timer_settime 223 110,
    timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111, clock_gettime 228 113, clock_getres 229 114,
    clock_nanosleep 230 115, exit_group 231 94, epoll_wait 232 -, epoll_ctl 233 21, tgkill 234 131, utimes 235 -,
    waitid 247 95, ioprio_get 252 31, openat 257 56, mkdirat 258 34, mknodat 259 33, fchownat 260 54, futimesat 261 -,
    newfstatat 262 79, unlinkat 263 35, renameat 264 38, linkat 265 37, symlinkat 266 36, readlinkat 267 78,
    fchmodat 268 53, faccessat 269 48, pselect6 270 72, ppoll 271 73, set_robust_list 273 99, get_robust_list 274 100,
    splice 275 76, tee 276 77, sync_file_range 277 84, utimensat 280 88, epoll_pwait 281 22, signalfd 282 -,
    timerfd_create 283 85, eventfd 284 -, fallocate 285 47, timerfd_settime 286 86, timerfd_gettime 287 87,
    accept4 288 242, signalfd4 289 74, eventfd2 290 19, epoll_create1 291 20, dup3 292 24, pipe2 293 59, preadv 295 69,
    pwritev 296 70, rt_tgsigqueueinfo 297 240, recvmmsg 299 243, syncfs 306 267, sendmmsg 307 269, getcpu 309 168,
    sched_getattr 315 275, renameat2 316 276, getrandom 318 278, execveat 322 281, membarrier 324 283, mlock2 325 284,
    copy_file_range 326 285, preadv2 327 286, pwritev2 328 287, statx 332 291, rseq 334 293, pidfd_send_signal 424 424,
    pidfd_open 434 434, close_range 436 436, openat2 437 437, faccessat2 439 439, epoll_pwait2 441 441,
    futex_waitv 449 449, get_mempolicy 239 236, mbind 237 235, set_mempolicy 238 237, munlockall 152 231,
    mlockall 151 230, tkill 200 130, fchmodat2 452 452, futex_wake 454 454, futex_wait 455 455, futex_requeue 456 456,
    landlock_create_ruleset 444 444, landlock_add_rule 445 445, landlock_restrict_self 446 446
""")

# Allowed or refused by their arguments: `seccomp.build_filter`.
CHECKED: dict[str, tuple[int | None, int | None]] = {
    "clone": (56, 220),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "personality": (135, 92),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "setpriority": (141, 140),
    "setrlimit": (160, 164),
    "socket": (41, 198),
    "socketpair": (53, 199),
}

# What touches other processes, starts one, or reaches anything but files: a process that runs WebAssembly needs none.
OF_OTHERS = (
    *("execve", "execveat", "fork", "vfork", "wait4", "waitid", "setsid", "setpgid"),
    *("kill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "pidfd_send_signal"),
    *("socket", "socketpair", "connect", "bind", "listen", "accept", "accept4", "shutdown", "setsockopt", "getsockopt"),
    *("sendto", "sendmsg", "sendmmsg", "recvfrom", "recvmsg", "recvmmsg", "getsockname", "getpeername"),
    *("sched_setattr", "sched_setparam", "sched_setscheduler", "setpriority", "setrlimit", "personality"),
    *("mknod", "mknodat", "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("flock", "mlock", "mlock2", "mlockall"),
)

# What a process needs that only computes, and answers on a socket that it has. Nothing here takes a path, makes a
# descriptor, or names another process.
COMPUTE = (
    *("read", "write", "readv", "writev", "close", "poll", "ppoll", "exit", "exit_group", "restart_syscall"),
    *("mmap", "mprotect", "munmap", "mremap", "brk", "madvise", "futex", "sched_yield", "nanosleep", "clock_nanosleep"),
    *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "getpid", "gettid", "getrandom", "rseq"),
    *("clock_gettime", "clock_getres", "gettimeofday", "time", "getrusage", "lseek", "fstat", "set_robust_list"),
)

# glibc and libffi fall back to older calls on ENOSYS, not on EPERM, and who watches files falls back to looking.
MISSING: dict[str, tuple[int | None, int | None]] = {
    "clone3": (435, 435),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "memfd_create": (319, 279),
}

# The newest number any table here knows; later calls answer ENOSYS as on an older kernel.
LAST = 456
