"""The system-call filter of sandboxed programs, as classic BPF for `bwrap --seccomp`.

Programs in the sandbox are ordinary Python, so the filter names what they may not call: calls that
make namespaces or mounts, look into other processes, reach kernel subsystems known for escapes, or
take memory that no limit counts. Calls newer than this table answer ENOSYS. No capability is left
in the sandbox either; the filter takes away what needs none.

Source: Documentation/userspace-api/seccomp_filter.rst of the Linux kernel.
"""

from __future__ import annotations

import errno
import platform
import struct

_SECCOMP_RET_ALLOW = 0x7FFF0000
_SECCOMP_RET_ERRNO = 0x00050000
_SECCOMP_RET_KILL_PROCESS = 0x80000000
# Offsets in struct seccomp_data.
_NR, _ARCH, _ARG0, _ARG1, _ARG3 = 0, 4, 16, 24, 40
_HIGH_HALF = 4
_LOAD, _JEQ, _JGT, _JGE, _JSET, _RET = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
# CLONE_NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | NEWNS
_CLONE_NEW = 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x20000
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_SHARED_BYTES = 4096
"""Largest shared mapping where a program can open /dev/zero: a semaphore fits into it."""
_TIOCSTI, _TIOCLINUX, _TIOCSETD = 0x5412, 0x541C, 0x5423
_LAST_KNOWN = 462  # mseal, Linux 6.10; the numbers are the same on both machines from 424 on

# name: (x86-64, aarch64); None where the machine has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "ioprio_set": (251, 30),
    # parts of the kernel known for escapes
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "lookup_dcookie": (212, 18),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "uselib": (134, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # memory that no limit counts: it belongs to no process once it is unmapped
    "vmsplice": (278, 75),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}


# Of which some arguments are refused, or which hide them.
_LOOKED_AT = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "ioctl": (16, 29),
    "mmap": (9, 222),
}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Allowed on the caller itself only: elsewhere they change another process of the same user, such as
# the guest, whose limits all later programs would inherit. (x86-64, aarch64, arguments that are 0)
_ON_ITSELF: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "prlimit64": (302, 261, (_ARG0,)),
    "sched_setaffinity": (203, 122, (_ARG0,)),
    "sched_setparam": (142, 118, (_ARG0,)),
    "sched_setscheduler": (144, 119, (_ARG0,)),
    "sched_setattr": (314, 274, (_ARG0,)),
    "setpriority": (141, 140, (_ARG0, _ARG1)),
}


def compile_filter(
    machine: str | None = None, *, private_dev: bool, internet: bool = False
) -> bytes:
    """Return the filter as an array of `struct sock_filter`.

    Args:
        private_dev: /dev is the sandbox's own, without a /dev/zero. Otherwise shared mappings of
            more than a page are refused: nothing tells those of /dev/zero from others.
        internet: allow IP sockets, which reach what the network namespace has.
        machine: `x86_64` or `aarch64`; None is this machine.

    Raises:
        ValueError: there is no table of system calls for this machine.
    """
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        raise ValueError(
            f"the sandbox has no system-call filter for this machine ({machine!r}); it runs on "
            f"{' and '.join(_AUDIT_ARCH)}"
        )
    column = list(_AUDIT_ARCH).index(machine)
    number_of = {name: numbers[column] for name, numbers in _LOOKED_AT.items()}
    refuse = _SECCOMP_RET_ERRNO | errno.EPERM
    unknown = _SECCOMP_RET_ERRNO | errno.ENOSYS
    program = [
        _op(_LOAD, _ARCH),
        _op(_JEQ, _AUDIT_ARCH[machine], true=1),
        _op(_RET, _SECCOMP_RET_KILL_PROCESS),
        _op(_LOAD, _NR),
        # x32 calls have the x86-64 arch value and numbers of their own.
        *_return_if(_JGE, _LAST_KNOWN + 1, unknown),
        # clone3 hides its flags in memory; without it libc falls back to clone.
        *_return_if(_JEQ, number_of["clone3"], unknown),
    ]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            program += _return_if(_JEQ, number, refuse)
    program += _check_argument(number_of["clone"], _ARG0, _return_if(_JSET, _CLONE_NEW, refuse))
    for *calls, arguments in _ON_ITSELF.values():
        for argument in arguments:
            others = [_op(_JEQ, 0, true=1), _op(_RET, refuse)]
            program += _check_argument(calls[column], argument, others)
    inet = (_AF_INET, _AF_INET6) if internet else ()
    program += _check_argument(number_of["socket"], _ARG0, _only_families(_AF_UNIX, *inet))
    program += _check_argument(number_of["socketpair"], _ARG0, _only_families(_AF_UNIX))
    terminal: list[bytes] = []
    for code in (_TIOCSTI, _TIOCLINUX, _TIOCSETD):
        terminal += _return_if(_JEQ, code, refuse)
    program += _check_argument(number_of["ioctl"], _ARG1, terminal)
    program += _check_argument(number_of["mmap"], _ARG3, _refuse_shared(refuse, private_dev))
    program.append(_op(_RET, _SECCOMP_RET_ALLOW))
    return b"".join(program)


def _only_families(*families: int) -> list[bytes]:
    """Refuse the families of sockets that are not named."""
    last = len(families)
    tests = [_op(_JEQ, family, true=last - i) for i, family in enumerate(families)]
    return [*tests, _op(_RET, _SECCOMP_RET_ERRNO | errno.EAFNOSUPPORT)]


def _refuse_shared(refuse: int, private_dev: bool) -> list[bytes]:
    """Refuse shared memory of no file, which stays when a process drops it from its page tables."""
    anonymous = _return_if(_JSET, _MAP_ANONYMOUS, refuse)
    if not private_dev:
        anonymous += [
            _op(_LOAD, _ARG1 + _HIGH_HALF),
            *_return_if(_JGT, 0, refuse),
            _op(_LOAD, _ARG1),
            *_return_if(_JGT, _SHARED_BYTES, refuse),
        ]
    return [_op(_JSET, _MAP_SHARED, false=len(anonymous)), *anonymous]


def _op(code: int, value: int, *, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, true, false, value)


def _return_if(test: int, value: int, result: int) -> list[bytes]:
    return [_op(test, value, false=1), _op(_RET, result)]


def _check_argument(number: int, offset: int, body: list[bytes]) -> list[bytes]:
    # Arguments are 64-bit words; the kernel reads these as 32 bits, so the low half decides.
    checked = [_op(_LOAD, offset), *body, _op(_LOAD, _NR)]
    return [_op(_JEQ, number, false=len(checked)), *checked]
