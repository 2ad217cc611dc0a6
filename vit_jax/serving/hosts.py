"""Check of the Host header of requests, against DNS rebinding.

A web page can point its own domain name to this machine (DNS rebinding) and then read this server's
responses as its own. The Host header of its requests still contains that domain.
"""

import ipaddress
import re
import socket
from collections.abc import Collection


def is_ours(host: str, names: Collection[str] = ()) -> bool:
    """Returns True for a Host header that no foreign domain can have.

    It is an address, localhost, this machine's name or one of `names`; `*` in `names` allows all.
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
