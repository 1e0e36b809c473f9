"""Many files looked at by a few threads (decoders work outside Python's lock), and what makes an answer about a file hold later on."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from hiresvis.data.cache import file_state, surroundings
from hiresvis.profiles import hash_sources

_IN_LINE = 4  # files a thread has waiting
_Result = TypeVar("_Result")


def in_threads(look: Callable[[str], _Result], paths: Sequence[str], threads: int | None = None) -> Iterator[tuple[str, _Result]]:
    """What looking finds, in the order of the paths; few of them wait, so that a stop and a long list cost nothing.

    Args:
        threads: that look; None: one a core, 4 at most, for each holds an image.
    """
    number = threads or min(4, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(number, thread_name_prefix="check")
    waiting: deque[tuple[str, Future[_Result]]] = deque()
    try:
        for path in paths:
            waiting.append((path, pool.submit(look, path)))
            if len(waiting) >= _IN_LINE * number:
                done, found = waiting.popleft()
                yield done, found.result()
        while waiting:
            done, found = waiting.popleft()
            yield done, found.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a stop does not wait for files that are still in line


def question(asked: Sequence[Any], sources: Sequence[str]) -> str:
    """Of everything besides the file that decides what is found of it: what is asked, the libraries, and the sources that look."""
    text = json.dumps([*asked, surroundings(), hash_sources(sources)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def key_of(path: str, asked: str) -> str:
    """Tells whether the file or the question changed; empty for a file that cannot be found."""
    state = file_state(Path(path))
    return "" if state is None else f"{' '.join(map(str, state))} {asked}"
