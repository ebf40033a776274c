"""The demo's inference worker: a mini engine in a process of its own, driven by lines of JSON.

Reads one command a line from stdin, writes one event a line to what was stdout (prints of libraries go to
stderr), and ends when stdin does. Commands:

    {"op": "ask", "id": ..., "tokens": [...], "max_new_tokens": n, "ignore_eos": bool}
        -> {"event": "progress", "id", "filled", "target", "generated"} as it goes, then {"event": "done",
        ...}
    {"op": "settle"}          -> {"event": "settled"} once no request and no copy is under way
    {"op": "flush_device"}    -> {"event": "flushed", "pages"}
    {"op": "flush_host"}      -> {"event": "flushed", "pages"}; -1: no sidecar answered
    {"op": "stats"}           -> {"event": "stats", "attached", "values"}

The first event is {"event": "ready", "attached", "slots", "page_tokens", "token_bytes"}.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import select
import signal
from pathlib import Path
from typing import Any

import torch

from mini_engine.engine import Engine, Phase, Request
from mini_engine.model import Llama, Span


class Session:
    """The loop between the pipe and the engine. One thread."""

    def __init__(self, engine: Engine, events: int) -> None:
        self.engine = engine
        self.events = events
        self.requests: list[Request] = []
        self.reported: dict[str, tuple[int, int]] = {}
        self.settling = False
        self.buffer = b""

    def serve(self) -> None:
        """Until stdin ends."""
        while True:
            idle = not self.engine.busy
            worked = self.engine.step()
            if self.settling and not self.engine.busy:
                self.settling = False
                self.tell(event="settled")
            self.report()
            if not self.read(0.2 if idle else 0.0):
                return
            if not worked and self.engine.busy:
                self.engine.worker.wait(0.02)

    def read(self, timeout_s: float) -> bool:
        """Take in commands that have come, waiting for one at most `timeout_s`; False at the end of stdin."""
        while select.select([0], [], [], timeout_s)[0]:
            data = os.read(0, 1 << 20)
            if not data:
                return False
            *lines, self.buffer = (self.buffer + data).split(b"\n")
            for line in lines:
                self.command(json.loads(line))
            timeout_s = 0.0
        return True

    def command(self, command: dict[str, Any]) -> None:
        op = command["op"]
        if op == "ask":
            request = self.engine.add(
                command["id"],
                command["tokens"],
                command["max_new_tokens"],
                ignore_eos=command["ignore_eos"],
            )
            self.requests.append(request)
        elif op == "settle":
            self.settling = True
        elif op == "flush_device":
            self.tell(event="flushed", pages=self.engine.flush_device())
        elif op == "flush_host":
            flushed = self.engine.worker.flush()
            self.tell(event="flushed", pages=-1 if flushed is None else sum(flushed))
        elif op == "stats":
            self.tell(event="stats", attached=self.engine.worker.attached, values=self.engine.worker.stats())
        else:
            raise ValueError(f"unknown command {op!r}")

    def report(self) -> None:
        for request in list(self.requests):
            state = request.filled, len(request.tokens)
            if request.phase is not Phase.DONE and self.reported.get(request.id) != state:
                self.reported[request.id] = state
                self.tell(
                    event="progress",
                    id=request.id,
                    phase=request.phase.value,
                    filled=request.filled,
                    target=request.target,
                    generated=len(request.generated),
                )
        for request in [request for request in self.requests if request.phase is Phase.DONE]:
            self.requests.remove(request)
            assert request.first_logits is not None
            logits = request.first_logits.contiguous().numpy().tobytes()
            self.tell(
                event="done",
                id=request.id,
                generated=request.generated,
                first_logits=hashlib.sha256(logits).hexdigest(),
                prompt_tokens=request.prompt_tokens,
                computed=request.computed,
                from_device=request.from_device,
                from_host=request.from_host,
                miss_reason=request.miss_reason,
                first_token_s=request.first_token_s,
                load_s=request.load_s,
                finished_s=request.finished_s,
            )

    def tell(self, **event: Any) -> None:
        view = memoryview(json.dumps(event).encode() + b"\n")
        while view:
            view = view[os.write(self.events, view) :]


def warm_up(engine: Engine) -> None:
    """Touch the KV buffer and the weights, so that the first request does not pay for it."""
    engine.memory.kv_buffer.zero_()
    hold = torch.full((64,), engine.memory.HOLD_TOKEN_MEMINDEX)
    for _ in range(2):
        engine.model.forward(
            torch.zeros(64, dtype=torch.long),
            torch.arange(64),
            hold,
            [Span(64, hold)],
            engine.memory.kv_buffer.__getitem__,
        )
    engine.memory.kv_buffer[:, engine.memory.HOLD_TOKEN_MEMINDEX] = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with weights, config and tokenizer")
    parser.add_argument("--slots", type=int, required=True, help="tokens of KV that the device holds")
    parser.add_argument("--run-dir", type=Path, required=True, help="where the sidecar is")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    events = os.dup(1)
    os.dup2(2, 1)
    engine = Engine(Llama.load(arguments.model), slots=arguments.slots, run_dir=arguments.run_dir)
    try:
        warm_up(engine)
        session = Session(engine, events)
        session.tell(
            event="ready",
            attached=engine.worker.wait_attached(5.0),
            slots=arguments.slots,
            page_tokens=engine.page_tokens,
            token_bytes=engine.memory.get_cell_size(),
        )
        session.serve()
    finally:
        engine.close()


if __name__ == "__main__":
    main()
