"""The job of a chaos run: records its start, heartbeats and end, with its attempt's token.

python -I -S job_main.py RECORD DURATION_MS BEAT_MS

RECORD is a file of the driver; neither the agent nor the keeper knows it. Each line is a single write, so that the lines of
many jobs do not mix. On SIGTERM it records that and ends with exit code 143. With a duration of 0 it runs until then.
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

    def record_event(event: str) -> None:
        os.write(out, f"{now_ms()} {event} {replica} {token} {node} {os.getpid()}\n".encode())

    def stop(_number: int, _frame: object) -> None:
        record_event("term")
        os._exit(143)

    signal.signal(signal.SIGTERM, stop)
    record_event("start")
    until_ms = now_ms() + duration_ms
    while not duration_ms or now_ms() < until_ms:
        time.sleep(beat_ms / 1000)
        record_event("beat")
    record_event("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
