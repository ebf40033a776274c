"""The scheduler: continuous batching and chunked prefill, with KV from the device, from the host, or
computed.

One engine is one thread. A request passes through these phases, and each `step()` moves every request on:

    WAITING   until the device has room for its prompt (`TaskCacheManager.task_alloc`, which also finds what
              prefix the device still has)
    LOOKUP    until `Worker.lookup` says what more the host has; then, if that is worth it:
    LOADING   while `Worker.load` copies; other requests prefill and decode meanwhile
    PREFILL   one chunk a step, the oldest request first; whole pages are offloaded after each chunk
    DECODE    one token a step, all such requests in one batch
    DONE

How the same answer comes out bit by bit, wherever the KV came from: the last chunk of a prefill always
starts at `tail`, the last whole page of the host's pool that leaves a token to compute, and nothing is
reused beyond it. So the first logits come from a call with the same shapes over the same bytes, whether the
context was computed in chunks just now, lay on the device, or was loaded. (KV that *another* prompt left,
whose chunks ended elsewhere, is the same up to rounding, as in every engine.)
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike

import torch
from torch import Tensor

from kvtier.config import Options
from kvtier.keys import PageChain
from kvtier.memory import (
    AllocationStrategy,
    ContiguousStrategy,
    CopyHold,
    MemoryManager,
    PagedStrategy,
    ReqToTokenPool,
    TaskCacheManager,
)
from kvtier.tasks import LoadTask, OffloadTask, Task, TaskState
from kvtier.worker import Worker

from .model import Llama, Span

DEFAULTS = Options()


class Phase(enum.Enum):
    """Where a request is; see the module."""

    WAITING = "waiting"
    LOOKUP = "lookup"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(eq=False)
class Request:
    """One request: what was asked, how far it is, and what came out. Read it; only the engine writes it."""

    id: str
    tokens: list[int] = field(repr=False)  # the prompt, then what was generated
    prompt_tokens: int
    max_new_tokens: int
    ignore_eos: bool
    chain: PageChain
    phase: Phase = Phase.WAITING
    target: int = 0  # tokens that the prefill must reach
    tail: int = 0  # where its last chunk starts
    filled: int = 0  # tokens whose KV is in the request's slots
    offered: int = 0  # tokens that were given to `offload`
    load: LoadTask | None = None

    from_device: int = 0  # prompt tokens reused
    from_host: int = 0
    computed: int = 0  # prompt tokens that went through the model
    miss_reason: str = ""  # why the host brought nothing
    preempted: int = 0
    first_logits: Tensor | None = field(default=None, repr=False)
    arrived_s: float = 0.0
    load_began_s: float = 0.0
    load_s: float = 0.0  # from `load` until its task was final
    first_token_s: float = 0.0  # after the arrival
    finished_s: float = 0.0

    @property
    def generated(self) -> list[int]:
        """The new tokens so far."""
        return self.tokens[self.prompt_tokens :]


class Engine:
    """Serves requests on `model`, with KV for `slots` tokens on the device. Belongs to one thread.

    `run_dir`: where the sidecar is, if there is one; it may come, go and come back. `page_tokens`: tokens of
    a host page (None: kvtier's default size), `device_page`: of a device page, `chunk`: of a prefill step.
    `max_tokens`: give each request a fixed range of so many slots, with nothing shared on the device, in the
    place of device pages. `make_worker` is for tests.
    """

    def __init__(
        self,
        model: Llama,
        *,
        slots: int,
        run_dir: str | PathLike[str] | None = None,
        options: Options = DEFAULTS,
        page_tokens: int | None = None,
        device_page: int = 16,
        max_tokens: int | None = None,
        chunk: int = 512,
        max_requests: int = 16,
        make_worker: Callable[..., Worker] = Worker,
    ) -> None:
        cfg = model.config
        self.model, self.options, self.chunk = model, options, chunk
        self.memory = MemoryManager(
            slots, torch.float32, cfg.num_key_value_heads, cfg.head_dim, cfg.num_hidden_layers
        )
        strategy: AllocationStrategy
        if max_tokens is None:
            strategy = PagedStrategy(self.memory.allocator, device_page)
        else:
            strategy = ContiguousStrategy(self.memory.allocator, max_tokens)
        self.capacity = min(strategy.capacity, cfg.max_position_embeddings)
        rows = ReqToTokenPool(max_requests, self.capacity, self.memory.HOLD_TOKEN_MEMINDEX, self.memory.owner)
        self.tasks = TaskCacheManager(self.memory, rows, strategy)
        buffers = self.memory.kv_buffers(page_tokens, engine="mini_engine/1 rope=halves")
        self.page_tokens = buffers.layout.page_tokens
        if chunk % self.page_tokens or self.page_tokens % device_page:
            raise ValueError(
                f"chunk={chunk}, host pages of {self.page_tokens} tokens, device pages of {device_page}: "
                "each must be a multiple of the next"
            )
        self.namespace = buffers.layout.namespace(cfg.name, revision=cfg.revision)
        self.worker = make_worker(buffers, run_dir=run_dir, options=options)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission
        self.copies: dict[int, tuple[Request, CopyHold | None]] = {}  # tasks not back yet, by their id

    # --- requests ---

    def add(
        self, request_id: str, prompt: list[int], max_new_tokens: int, *, ignore_eos: bool = False
    ) -> Request:
        """Queue a request. ValueError for one that could never run, or an id that is in use."""
        if not 1 <= len(prompt) < self.capacity or max_new_tokens < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones: this engine has room for "
                f"{self.capacity} tokens, and a prompt needs one or more and a place for an answer"
            )
        if any(other.id == request_id for other in (*self.waiting, *self.running)):
            raise ValueError(f"request {request_id!r} is running already")
        chain = PageChain(self.namespace, self.page_tokens)
        max_new_tokens = min(max_new_tokens, self.capacity - len(prompt))
        request = Request(request_id, list(prompt), len(prompt), max_new_tokens, ignore_eos, chain)
        request.arrived_s = time.perf_counter()
        self._aim(request)
        self.waiting.append(request)
        self.worker.ask(request_id, chain)
        return request

    def cancel(self, request: Request) -> None:
        """End `request` where it is; nothing for one that is done."""
        if request in self.waiting:
            self.waiting.remove(request)
            self.worker.cancel(request.id)
        elif request in self.running:
            self._leave(request, self.worker.cancel)
        request.phase = Phase.DONE

    def flush_device(self) -> int:
        """Forget the device's prefix cache; answers how many device pages are free by that."""
        return self.tasks.flush()

    @property
    def busy(self) -> bool:
        """Requests, or copies, are under way."""
        return bool(self.waiting or self.running or self.copies)

    def run(self) -> None:
        """Step until nothing is under way."""
        while self.busy:
            if not self.step():
                self.worker.wait(0.05)

    def close(self) -> None:
        """End in bounded time."""
        self.worker.close()

    # --- one step ---

    def step(self) -> bool:
        """Move every request on as far as it goes in one step; False: there was nothing to do but wait."""
        self._admit()
        worked = self._prefill()
        worked = self._decode() or worked
        for task in self.worker.step():
            self._final(task)
            worked = True
        return worked

    def _aim(self, request: Request) -> None:
        """Set what a prefill of all tokens so far must reach, and where its last chunk starts."""
        request.target = len(request.tokens)
        request.tail = (request.target - 1) // self.page_tokens * self.page_tokens
        request.chain.extend(request.tokens[request.chain.tokens :])

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            state = self.tasks.task_alloc(request.id, request.tokens, match_limit=request.tail)
            if state is None:
                break
            self.running.append(self.waiting.popleft())
            request.filled = request.from_device = state.cached
            request.phase = Phase.LOOKUP if state.cached < request.tail else Phase.PREFILL
        for request in self.running:
            if request.phase is Phase.LOOKUP:
                self._look_up(request)

    def _look_up(self, request: Request) -> None:
        hit = self.worker.lookup(request.id, request.chain, request.filled, limit=request.tail)
        if hit is None:
            return
        if not hit.tokens:
            request.miss_reason, request.phase = hit.reason, Phase.PREFILL
            return
        end = hit.first + hit.tokens
        hold = self.tasks.hold_load(request.id, hit.first, end)
        request.load = self.worker.load(hit, self.tasks.slots(request.id, hit.first, end))
        self.copies[request.load.id] = request, hold
        request.load_began_s = time.perf_counter()
        request.phase = Phase.LOADING

    def _prefill(self) -> bool:
        """One chunk of the oldest request that has one to compute."""
        request = next((request for request in self.running if request.phase is Phase.PREFILL), None)
        if request is None:
            return False
        start = request.filled
        end = request.target
        if start < request.tail:
            end = min((start // self.chunk + 1) * self.chunk, request.tail)
        logits = self.model.forward(
            torch.tensor(request.tokens[start:end]),
            torch.arange(start, end),
            torch.from_numpy(self.tasks.write_slots(request.id, start, end)).long(),
            [Span(end - start, torch.from_numpy(self.tasks.slots(request.id, 0, end)).long())],
            self.memory.kv_buffer.__getitem__,
        )
        request.computed += end - start
        self._filled(request, end)
        if end == request.target:
            request.phase = Phase.DECODE
            self._emit(request, logits[0])
        return True

    def _decode(self) -> bool:
        """One token for each request that decodes, in one batch."""
        batch = []
        for request in [request for request in self.running if request.phase is Phase.DECODE]:
            while request in self.running:
                slot = self.tasks.task_extend(request.id, [request.tokens[-1]])
                if slot is not None:
                    batch.append((request, int(slot[0])))
                    break
                self._preempt(self.running[-1])  # the youngest, so none that is in the batch already
        if not batch:
            return False
        logits = self.model.forward(
            torch.tensor([request.tokens[-1] for request, _ in batch]),
            torch.tensor([request.filled for request, _ in batch]),
            torch.tensor([slot for _, slot in batch]),
            [Span(1, torch.from_numpy(self.tasks.slots(request.id)).long()) for request, _ in batch],
            self.memory.kv_buffer.__getitem__,
        )
        for (request, _), row in zip(batch, logits, strict=True):
            self._filled(request, request.filled + 1)
            self._emit(request, row)
        return True

    def _filled(self, request: Request, length: int) -> None:
        """The KV of the first `length` tokens is there: share it, and offload the pages that became whole."""
        request.filled = length
        self.tasks.task_cached(request.id, length)
        whole = min(length, request.chain.tokens) // self.page_tokens * self.page_tokens
        if whole <= request.offered or self.options.write == "off":
            return
        request.offered = whole
        task = self.worker.offload(request.id, request.chain, self.tasks.slots(request.id, 0, whole))
        first, last = (page * self.page_tokens for page in (task.start_page, task.start_page + task.pages))
        hold = None if task.final else self.tasks.hold_offload(request.id, first, last)
        self.copies[task.id] = request, hold

    def _emit(self, request: Request, logits: Tensor) -> None:
        if request.first_logits is None:
            request.first_logits = logits
            request.first_token_s = time.perf_counter() - request.arrived_s
        request.tokens.append(int(logits.argmax()))
        ended = request.tokens[-1] == self.model.config.eos_token_id and not request.ignore_eos
        if ended or len(request.generated) >= request.max_new_tokens:
            if self.options.write == "all":  # the last token was never an input: it has no KV
                request.chain.extend(request.tokens[request.chain.tokens : request.filled])
                self._filled(request, request.filled)
            self._leave(request, self.worker.forget)
            request.phase = Phase.DONE
            request.finished_s = time.perf_counter() - request.arrived_s

    def _preempt(self, request: Request) -> None:
        """Take the device from `request`; it comes back first, and computes or loads what it had."""
        self._leave(request, self.worker.cancel)
        request.preempted += 1
        request.phase, request.filled, request.from_host = Phase.WAITING, 0, 0
        self._aim(request)
        self.waiting.appendleft(request)
        self.worker.ask(request.id, request.chain)

    def _leave(self, request: Request, tell: Callable[[str], None]) -> None:
        """Give back the device. Pages of copies under way are held until `_final` (never reused before)."""
        tell(request.id)
        self.tasks.task_free(request.id)
        self.running.remove(request)
        request.load = None
        request.offered = 0

    def _final(self, task: Task) -> None:
        """A copy has ended, well or not; its pages may be used, freed and rewritten from now on."""
        request, hold = self.copies.pop(task.id, (None, None))
        if hold is not None:
            self.tasks.release(hold)
        if request is None or request not in self.running:
            return
        if isinstance(task, LoadTask) and task is request.load:
            request.load, request.phase = None, Phase.PREFILL
            request.load_s = time.perf_counter() - request.load_began_s
            if task.state is TaskState.DONE:
                request.filled = task.first + task.tokens
                request.from_host = task.tokens
                self.tasks.task_cached(request.id, request.filled)
            else:  # nothing of it may be used: the same tokens are computed into the same slots
                request.miss_reason = f"load {task.state.value}: {task.reason}"
        elif isinstance(task, OffloadTask) and task.reason:  # less than offered: try the rest again later
            stored = task.start_page + task.pages * (task.state is TaskState.DONE)
            request.offered = min(request.offered, stored * self.page_tokens)
