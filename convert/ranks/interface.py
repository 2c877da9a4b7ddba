"""Which network interface gloo shall use: the one that leads to the other ranks.

Left alone, gloo takes the interface of the machine's own name, which on many machines is the loopback.
"""

from __future__ import annotations

import os
import socket
import struct

_SIOCGIFADDR = 0x8915  # Linux: linux/sockios.h


def name_interface(host: str, port: int) -> None:
    """Set ``GLOO_SOCKET_IFNAME``, unless it is set, to the interface by which ``host`` is reached.

    Nothing is set where that cannot be told: not Linux, another family of addresses, a name that does not resolve.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # of a datagram socket: nothing is sent
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                asked = struct.pack("256s", name.encode()[:15])
                try:
                    found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
                except OSError:  # it has no address
                    continue
                if socket.inet_ntoa(found[20:24]) == own:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
                    return
    except (OSError, ImportError):
        return
