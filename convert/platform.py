"""The few calls that differ between systems, each with a fallback: positional reads and writes, copies in the kernel.

Linux first. Windows has no ``pread``; macOS has no ``copy_file_range``; some filesystems refuse it. Setting
:data:`DISABLED` to names of calls switches the fallbacks on, which is how they are tested.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from functools import lru_cache

#: Calls that are treated as absent (``pread``, ``pwrite``, ``copy_file_range``, ``fallocate``, ``flock``,
#: ``renameat2``).
DISABLED: set[str] = set()

#: What is mounted where, on Linux.
MOUNTS = "/proc/self/mountinfo"
_COPY_BYTES = 8 << 20
#: Bytes per write. Linux 6 puts the page cache's pages together as large as one write is, and looks for them: of
#: 2 MiB pieces some took 4 s of system time per 2 GB, pieces of 256 KiB never more than 0.7 s (measured on 6.18, ext4).
_WRITE_BYTES = 256 << 10
#: Parameters of glibc's mallopt (malloc.h), and up to which size freed blocks are kept.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _KEPT_BYTES = -1, -3, 32 << 20
#: Parameters of Linux's renameat2 (fcntl.h, linux/fs.h).
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
#: Open files that are enough (and macOS allows no more).
_FILES = 10240
_seek_lock = threading.Lock()
_local = threading.local()
_UNSUPPORTED = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY)


def _has(call: str) -> bool:
    return call not in DISABLED and hasattr(os, call)


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` from ``offset``; returns how many bytes there were (less only at the end of the file)."""
    done = 0
    while done < len(buffer):
        if "pread" not in DISABLED and hasattr(os, "preadv"):
            count = os.preadv(fd, [buffer[done:]], offset + done)
        else:
            with _seek_lock:
                os.lseek(fd, offset + done, os.SEEK_SET)
                data = os.read(fd, min(len(buffer) - done, _COPY_BYTES))
            count = len(data)
            buffer[done : done + count] = data
        if count == 0:
            break
        done += count
    return done


def write_at(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        if _has("pwrite"):
            done += os.pwrite(fd, view[done : done + _WRITE_BYTES], offset + done)
        else:
            with _seek_lock:
                os.lseek(fd, offset + done, os.SEEK_SET)
                done += os.write(fd, view[done : done + _COPY_BYTES])


def reserve(fd: int, size: int) -> None:
    """Make a new file ``size`` bytes long and, where the filesystem can, give it its blocks at once.

    A disk that is too full then says so before anything is written, and writing 2 GB takes 0.2 s less of system time.

    Raises:
        OSError: The disk is too full.
    """
    os.ftruncate(fd, size)
    call = None if "fallocate" in DISABLED else _fallocate()
    if call is None or not size:
        return
    while call(fd, 0, 0, size):
        import ctypes

        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(number, os.strerror(number))
        return  # the filesystem has no such call


@lru_cache(maxsize=1)
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """Linux's own call: ``os.posix_fallocate`` would write zeros where the filesystem cannot reserve."""
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate64
    except (OSError, AttributeError, TypeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    found: Callable[[int, int, int, int], int] = call
    return found


def copy_range(source: int, target: int, start: int, to: int, count: int) -> int:
    """Copy bytes between files, inside the kernel where it can be done.

    Args:
        source: Descriptor to read.
        target: Descriptor to write.
        start: Offset in ``source``.
        to: Offset in ``target``.
        count: How many bytes.

    Returns:
        Bytes copied; less than ``count`` only where ``source`` ended.
    """
    done = 0
    if _has("copy_file_range"):
        try:
            while done < count:
                moved = os.copy_file_range(source, target, count - done, start + done, to + done)
                if moved == 0:  # the end of the file; some network filesystems say so without being there
                    break
                done += moved
            if done == count:
                return done
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    return done + _copy_through_buffer(source, target, start + done, to + done, count - done)


def _copy_through_buffer(source: int, target: int, start: int, to: int, count: int) -> int:
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_COPY_BYTES))
    done = 0
    while done < count:
        view = _local.buffer[: min(_COPY_BYTES, count - done)]
        got = read_at(source, view, start + done)
        write_at(target, view[:got], to + done)
        done += got
        if got < len(view):
            break
    return done


def keep_freed_memory() -> None:
    """Ask glibc to reuse freed blocks of the size of our pieces instead of returning them to the system.

    Without it every piece is a fresh mapping whose pages are faulted in one by one: measured on a bf16 → f16 conversion
    of 2.5 GB, 5.2 s of system time instead of 2.1 s. A no-op with another allocator.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
    mallopt(_M_TRIM_THRESHOLD, 2 * _KEPT_BYTES)


def allow_many_files() -> None:
    """Let this process open as many files as it may: some systems begin with 256, and a large model is more shards."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the system knows a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def available_memory() -> int | None:
    """Bytes that a process can still take: what the system has left, and its container's limit; None if unknown."""
    found = []
    for path in ("/proc/meminfo", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError):
            continue
        if path.endswith("meminfo"):
            found += [int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("MemAvailable:")]
        elif text.strip().isdecimal():  # "max": no limit
            found.append(int(text))
    return min(found, default=None)


def lock_file(fd: int) -> bool | None:
    """Lock an open file for as long as it is open; whether nobody else holds it.

    None where there are no such locks (Windows, some network filesystems).
    """
    if "flock" in DISABLED:
        return None
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_mount(path: str | os.PathLike[str]) -> bool:
    """Whether something is mounted just there, be it another folder (or file) of the same disk."""
    if os.path.ismount(path):
        return True
    try:
        with open(MOUNTS, "rb") as file:
            places = {line.split()[4] for line in file}
    except (OSError, IndexError):
        return False
    real = os.fsencode(os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)))
    for letter in b"\\", b" ", b"\t", b"\n":  # the list has them as octal numbers
        real = real.replace(letter, b"\\%03o" % ord(letter))
    return real in places


def sync_data(fd: int) -> None:
    """Bring the data of an open file to the disk (with its size; not its times, where the system can leave them)."""
    getattr(os, "fdatasync", os.fsync)(fd)


def exchange(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> bool:
    """Let two folders or files of one disk change names, in one step; False where the system cannot (nothing is done).

    Raises:
        OSError: It could, and failed.
    """
    if "renameat2" in DISABLED:
        return False
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # not Linux, or an old C library
        return False
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), os.fspath(b))


def forget_cached(fd: int) -> None:
    """Ask that the next reads of a synced file come from the disk; a no-op where that cannot be asked."""
    if hasattr(os, "posix_fadvise"):
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            return


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make a rename in this folder durable; a no-op where folders cannot be opened."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)
