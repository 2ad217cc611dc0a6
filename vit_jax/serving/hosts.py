"""Checks the Host header of requests, to prevent DNS rebinding.

With DNS rebinding, a malicious web page points its own domain name to this machine, so that its
scripts can read the server's responses. The Host header of these requests contains that domain.
"""

import ipaddress
import re
import socket
from collections.abc import Collection


def is_ours(host: str, names: Collection[str] = ()) -> bool:
    """Returns True if the Host header of a request is allowed.

    IP addresses, localhost, this machine's name and `names` are allowed, because a malicious web
    page cannot use them. If `names` contains `*`, every Host header is allowed.
    """
    name = re.sub(r":\d*$", "", host).strip("[]").lower().removesuffix(".")
    if "*" in names or name == "localhost" or name.endswith(".localhost"):
        return True
    if name in {socket.gethostname().lower(), *(each.lower() for each in names)}:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
