"""Work spread over processes of which any may die, and which do not outlive the program that started them."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from queue import SimpleQueue
from typing import Any


def begin(configure: Callable[[], None] | None) -> None:
    """Every process's first act. It ends with its parent, however that ends: a pool would otherwise wait for work for ever."""

    def follow() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    if configure is not None:
        configure()


def each(
    function: Callable[..., Any], cells: Sequence[tuple], jobs: int, configure: Callable[[], None] | None = None
) -> Iterator[tuple[tuple, Future]]:
    """Cells with the future of `function(*cell)`, as they are done, in `jobs` processes that call `configure` first.

    Every process is a pool of its own: one that dies breaks the pool, which fails all that it was given.
    """

    def pool() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=begin, initargs=(configure,))

    pools: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()
    for _ in range(jobs):
        pools.put(pool())

    def run(cell: tuple) -> Any:
        mine = pools.get()
        try:
            return mine.submit(function, *cell).result()
        except BrokenProcessPool:
            mine.shutdown()
            mine = pool()
            raise
        finally:
            pools.put(mine)

    threads = ThreadPoolExecutor(jobs)
    try:
        futures = {threads.submit(run, cell): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future], future
    finally:
        threads.shutdown(cancel_futures=True)
        for _ in range(jobs):
            pools.get().shutdown()
