"""`kvtier drain`: let what runs come to its end, then end the sidecar; or take that back."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kvtier.cli.control import Control, NoSidecarError, Values, checked, connect, fail, show_json
from kvtier.config import default_run_dir

POLL_S = 0.2
END_S = 30.0
"""How long a sidecar whose drain is over may take to end."""


def drain(run_dir: Path | None, timeout_s: float, wait: bool, as_json: bool) -> None:
    """Exit status 0 when nothing was running at the end, 1 when something was, 3 when there is no sidecar."""
    with connect(run_dir or default_run_dir()) as control:
        seen = checked(control.one("drain", timeout_s))
        if wait:
            seen = _watch(control, seen, quiet=as_json)
    if as_json:
        show_json(seen)
    elif not wait:
        print(f"draining: {_running(seen)}")
    elif seen["ended"] == "idle":
        print("drained: nothing was running, and the sidecar has ended")
    if wait and seen["ended"] != "idle":
        fail(f"the sidecar has ended at its deadline; {_running(seen)}: those copies are abandoned")


def undrain(run_dir: Path | None, as_json: bool) -> None:
    """Exit status 1 when it was not draining, or it is too late."""
    with connect(run_dir or default_run_dir()) as control:
        seen = checked(control.one("undrain"))
    if as_json:
        show_json(seen)
    else:
        print("serving as before")


def _watch(control: Control, seen: Values, quiet: bool) -> Values:
    """Follow the drain until the sidecar has ended; what was seen last. Progress goes to stderr."""
    said, over_at = "", 0.0
    try:
        while True:
            text = f"draining: {_running(seen)}, at most {seen['seconds_left']} s left"
            if not quiet and not seen["ended"] and text != said:
                print(text, file=sys.stderr)
                said = text
            if seen["ended"]:
                over_at = over_at or time.monotonic()
                if time.monotonic() > over_at + END_S:
                    fail(f"drained, but the sidecar has not ended within {END_S:g} s")
            control.wait(POLL_S)
            seen = checked(control.one("progress"))
            if not seen["draining"]:
                fail("the drain was taken back: the sidecar serves as before")
    except NoSidecarError:
        if not seen["ended"]:
            fail(f"the sidecar ended before its drain did; {_running(seen)} when it was last asked")
    except KeyboardInterrupt:
        print("kvtier: the drain goes on without you; kvtier drain --undo takes it back", file=sys.stderr)
        sys.exit(128 + 2)
    return seen


def _running(seen: Values) -> str:
    leases = seen["leases"]
    return f"{leases} lease{'' if leases == 1 else 's'} running, {seen['sessions']} sessions attached"
