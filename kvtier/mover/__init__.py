"""Copies between one rank's device and the pool: `Mover` is the only face.

`lanes` holds the queues and moves pieces; `copying` is the thread that runs them and owns the session with
the sidecar; `mover` is what the engine's thread calls.
"""

from kvtier.mover.mover import Mover

__all__ = ["Mover"]
