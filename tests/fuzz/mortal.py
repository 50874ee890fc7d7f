"""Runs calls of `osciformer` in forks of one process that has imported all, and kills them.

Reads a JSON object per line: the arguments, the signal, and the moment: after some seconds, or at
the event of some number that touches a file below a folder. Answers with the status and how many
such events there were.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

TOUCHING = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.listdir"}


def run(call: dict[str, Any], report: int) -> None:
    """Run a call to its end, which may be at an event; in a fork."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(call["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in TOUCHING and arguments and str(arguments[0]).startswith(call["below"]):
            count += 1  # first, as the signal may raise here, and must come once
            if count - 1 == call.get("event"):
                os.kill(os.getpid(), call["signal"])

    sys.addaudithook(watch)
    code = 1
    try:
        from osciformer.cli import main

        code = main(call["arguments"])
    except BaseException as error:  # the signal came before or after the command
        print(f"{type(error).__name__} outside of the command")
    finally:
        os.write(report, str(count).encode())
        os._exit(code)


def main() -> None:
    """Answer one line after the other."""
    import osciformer.cli.app
    import osciformer.estimators
    import osciformer.train.callbacks  # noqa: F401

    for line in sys.stdin:
        call = json.loads(line)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            run(call, writing)
        os.close(writing)
        if "seconds" in call:
            time.sleep(call["seconds"])
            os.kill(pid, call["signal"])  # a dead child stays until it is asked for
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        events = os.read(reading, 64).decode()
        os.close(reading)
        print(json.dumps({"status": status, "events": int(events or 0)}), flush=True)


if __name__ == "__main__":
    main()
