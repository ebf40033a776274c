"""The pure core: prefix tree and host cache. Standard library only; no clock, lock, socket, log, numpy."""
