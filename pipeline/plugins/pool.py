"""Process pool that reports the correct exit cause.

Imported only where a plug-in is called: the processes themselves need no pebble until they are asked.
"""

import threading
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessPool
from pebble.pool.process import PoolManager


class _ReceivesFirst(PoolManager):
    """Receives the last messages of a process before it judges why that process has ended.

    A process says that it takes a call and makes it. One thread of pebble receives that, another sees
    processes end: where the second is faster, a call that ends its process at once looks like a process
    that never took one, and the call stays unanswered or the whole pool is given up.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._receiving = threading.Lock()

    def process_next_message(self, timeout: float) -> None:
        if self._has_message(timeout):
            self._receive()

    def update_workers(self) -> None:
        # One that has left with exit code 0 is not among those that are inspected.
        left = [(pid, 0) for pid, one in tuple(self.worker_manager.workers.items()) if one.exitcode == 0]
        expired = [*self.worker_manager.inspect_workers(), *left]
        while expired and self._has_message(0):
            self._receive()
        for expiration in expired:
            self.handle_worker_expiration(expiration)
        self.worker_manager.create_workers()  # type: ignore[no-untyped-call]

    def _has_message(self, timeout: float) -> bool:
        channel = self.worker_manager.pool_channel
        try:
            return channel is not None and channel.poll(timeout)
        except OSError as error:  # closed, since the pool is being stopped
            raise BrokenProcessPool from error

    def _receive(self) -> None:
        """Take a message and note it, as one step for both threads."""
        with self._receiving:
            super().process_next_message(0)


class Pool(ProcessPool):
    """pebble's pool, with a manager that receives first."""

    def __init__(self, workers: int, context: Any, **settings: Any) -> None:
        super().__init__(workers, context=context, **settings)
        self._pool_manager = _ReceivesFirst(self._context, context)
