"""Stands where another has started a Python, such as a rank of torchrun: `server.py` forks that, and this ends as it
ends.

Runs in a Python without site-packages, which starts in 10 ms.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.environ["ZEROTRAIN_TEST_SERVER"])
    arguments = [each for each in sys.argv[1:] if each != "-u"]
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(server, [b" "], [0, 1, 2])
    server.sendall(json.dumps(request).encode() + b"\n")
    answers = server.makefile()
    pid = int(answers.readline())
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(signum, lambda signum, _: os.kill(pid, signum))
    code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


main()
