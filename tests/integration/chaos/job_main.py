"""What does a job of the chaos run do? It writes down its own life: start, beats and end, with its attempt's token.

    python -I -S job_main.py RECORD DURATION_MS BEAT_MS

RECORD is a file of the judge's: neither the agent nor the keeper knows of it. Each line is one write of its own, so that the
lines of many jobs do not mix. Asked to stop, it says so, and ends with the exit code of one that was stopped. With a duration
of 0 it goes on until then.
"""

import os
import signal
import sys
import time


def main() -> int:
    record, duration_ms, beat_ms = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    out = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    replica, token, node = (os.environ.get(name, "") for name in ("REMIT_REPLICA", "REMIT_TOKEN", "REMIT_NODE"))

    def now_ms() -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def say(what: str) -> None:
        os.write(out, f"{now_ms()} {what} {replica} {token} {node} {os.getpid()}\n".encode())

    def stop(_number: int, _frame: object) -> None:
        say("term")
        os._exit(143)

    signal.signal(signal.SIGTERM, stop)
    say("start")
    until_ms = now_ms() + duration_ms
    while not duration_ms or now_ms() < until_ms:
        time.sleep(beat_ms / 1000)
        say("beat")
    say("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
