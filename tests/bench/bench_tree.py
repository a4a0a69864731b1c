"""Costs of the prefix index on one core: one JSON line a case, in microseconds.

python tests/bench/bench_tree.py [--page-size 1] [--only match,lookup,insert,evict,lock,serve]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from radix_mla.cache.eviction import LRU
from radix_mla.cache.prefix_cache import PrefixCache
from radix_mla.cache.radix_tree import RadixTree

LENGTHS = (1 << 10, 1 << 13, 1 << 15, 1 << 17)
SEGMENT = 512
VOCABULARY = 100_000


def main() -> None:
    cases = {
        "match": match_cases,
        "lookup": lookup_cases,
        "insert": insert_cases,
        "evict": evict_cases,
        "lock": lock_cases,
        "serve": serve_cases,
        "ghost": ghost_cases,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--only", default=",".join(cases))
    options = parser.parse_args()
    for name in options.only.split(","):
        for case, times in cases[name](options.page_size):
            report(case, options.page_size, times)


def report(case: str, page_size: int, times: list[float]) -> None:
    times.sort()
    result = {
        "case": case,
        "page_size": page_size,
        "runs": len(times),
        "us_min": round(times[0] * 1e6, 2),
        "us_median": round(statistics.median(times) * 1e6, 2),
        "us_p99": round(times[int(len(times) * 0.99)] * 1e6, 2),
    }
    print(json.dumps(result), flush=True)


def timed(call: Callable[[], object], runs: int) -> list[float]:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def random_tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.int32)


PAGES = np.arange(1 << 18, dtype=np.int32)


def insert(tree: RadixTree, tokens: np.ndarray) -> object:
    return tree.insert(tokens, PAGES[: -(-len(tokens) // tree.page_size)])


def chain(tree: RadixTree, tokens: np.ndarray, *, one_run: bool) -> None:
    """A path of SEGMENT-token nodes, kept apart by a branch at each border.

    In one run: inserted whole, cut afterwards. Otherwise each node is of an own run.
    """
    if one_run:
        insert(tree, tokens)
    for end in range(SEGMENT, len(tokens), SEGMENT):
        branch = np.append(tokens[:end], tokens[end] + 1).astype(np.int32)
        insert(tree, branch)
        if not one_run:
            insert(tree, np.append(tokens[:end], tokens[end] + 2).astype(np.int32))
    insert(tree, tokens)


def match_cases(page_size: int) -> Iterator[tuple[str, list[float]]]:
    for length in LENGTHS:
        tokens = random_tokens(length, 1)
        tree = RadixTree(page_size, LRU())
        insert(tree, tokens)
        yield f"match {length}, one node", timed(lambda: tree.match(tokens), 200)  # noqa: B023
        grown = RadixTree(page_size, LRU())
        for end in range(SEGMENT, length + 1, SEGMENT):
            insert(grown, tokens[:end])
        yield (
            f"match {length}, grown by {SEGMENT} ({grown.nodes.num_nodes} nodes)",
            timed(lambda: grown.match(tokens), 200),  # noqa: B023
        )
        for one_run in (True, False):
            tree = RadixTree(page_size, LRU())
            chain(tree, tokens, one_run=one_run)
            shape = "one run" if one_run else "own runs"
            yield (
                f"match {length}, chain of {length // SEGMENT} branching nodes, {shape}",
                timed(lambda: tree.match(tokens), 200),  # noqa: B023
            )


def lookup_cases(page_size: int) -> Iterator[tuple[str, list[float]]]:
    """4-node paths in a tree of 100k nodes."""
    tree = RadixTree(page_size, LRU())
    paths = {}
    for length in LENGTHS:
        tokens = random_tokens(length, length)
        for quarter in (1, 2, 3):
            cut = length * quarter // 4
            insert(tree, np.append(tokens[:cut], 1).astype(np.int32))
        insert(tree, tokens)
        paths[length] = tokens
    filler = random_tokens(16 * 100_000, 3).reshape(-1, 16)
    while tree.nodes.num_nodes < 100_000:
        insert(tree, filler[tree.nodes.num_nodes])
    if page_size > 1:
        query = np.zeros(page_size, dtype=np.int32)
        wide = RadixTree(page_size, LRU())
        for last in range(1, 10_001):
            insert(wide, np.append(query[1:], last).astype(np.int32))
        yield "partial match among 10k siblings", timed(lambda: wide.match(query), 200)
    for length, tokens in paths.items():
        yield f"lookup {length} in 100k nodes", timed(lambda: tree.match(tokens), 200)  # noqa: B023


def insert_cases(page_size: int) -> Iterator[tuple[str, list[float]]]:
    prefix = random_tokens(8192, 1)
    for length in LENGTHS:
        tree = RadixTree(page_size, LRU())
        insert(tree, prefix)
        insert(tree, np.append(prefix, 1).astype(np.int32))
        prompts = iter(
            [np.append(prefix, random_tokens(length, seed)).astype(np.int32) for seed in range(20)]
        )
        yield (
            f"insert {length} behind a cached 8192",
            timed(lambda: insert(tree, next(prompts)), 20),  # noqa: B023
        )


def evict_cases(page_size: int) -> Iterator[tuple[str, list[float]]]:
    for leaves in (1000, 10_000, 50_000):
        tree = RadixTree(page_size, LRU())
        keys = random_tokens(16 * leaves, 2).reshape(-1, 16)
        for key in keys:
            insert(tree, key)
        yield f"evict one page, {leaves} leaves", timed(lambda: tree.nodes.evict(1), 900)  # noqa: B023
    tree = RadixTree(page_size, LRU())
    for key in random_tokens(128 * 10_000, 2).reshape(-1, 128):
        insert(tree, key)
    yield "drain 1.28M tokens of 128-token leaves", timed(lambda: tree.nodes.evict(1 << 30), 1)


def lock_cases(page_size: int) -> Iterator[tuple[str, list[float]]]:
    for depth in (1, 16, 256):
        tokens = random_tokens(depth * SEGMENT, 1)
        tree = RadixTree(page_size, LRU())
        chain(tree, tokens, one_run=True)
        node = tree.match(tokens).node
        assert node is not None

        def lock_and_unlock() -> None:
            tree.nodes.lock(node)  # noqa: B023
            tree.nodes.unlock(node)  # noqa: B023

        yield f"lock and unlock, depth {depth}", timed(lock_and_unlock, 500)


def serve_cases(page_size: int) -> Iterator[tuple[str, list[float]]]:
    """acquire + grow + commit + release of 5k-token requests, 87% hits, in a full pool."""
    cache = PrefixCache(-(-1_000_000 // page_size), page_size)
    prefixes = [random_tokens(4350, seed) for seed in range(300)]
    chooser = np.random.default_rng(0)

    def serve() -> None:
        prefix = prefixes[chooser.integers(300)]
        tokens = np.append(prefix, chooser.integers(0, VOCABULARY, 650, dtype=np.int32))
        lease = cache.acquire(tokens, limit=len(tokens) - 1)
        cache.grow(lease, len(tokens))
        cache.commit(lease, tokens)
        cache.release(lease)

    timed(serve, 2000)
    yield "serve 5k tokens, 87% hits, full pool", timed(serve, 2000)
    lease = cache.acquire(prefixes[0])
    tokens = prefixes[0].tolist()

    def decode() -> None:
        tokens.append(7)
        cache.grow(lease, len(tokens))
        if len(tokens) % 256 == 0:
            cache.commit(lease, tokens)

    yield "decode one token: grow, commit every 256", timed(decode, 2000)


def ghost_cases(page_size: int) -> Iterator[tuple[str, list[float]]]:
    cache = PrefixCache(1000, 64)
    for length in LENGTHS:
        tokens = random_tokens(length, 1)
        yield (
            f"classify a miss of {length}",
            timed(lambda: cache.classify_miss(tokens, "", 0), 100),  # noqa: B023
        )


if __name__ == "__main__":
    main()
