"""Match: the longest cached prefix of a sequence below one root. Pure reads over the nodes."""

from __future__ import annotations

from typing import NamedTuple

from radix_mla.cache.radix_node import RadixNode
from radix_mla.cache.token_run import Int32Array, common_prefix, joined


class Partial(NamedTuple):
    """The page that holds the longest partial match behind the full pages, and its node."""

    page: int
    num_tokens: int
    node: RadixNode


class Match(NamedTuple):
    """The longest cached prefix. `pages` may be a view, good until the tree changes."""

    num_tokens: int  # full pages and the partial one
    pages: Int32Array  # full pages only
    partial: Partial | None
    node: (
        RadixNode | None
    )  # deepest node with a matching full page, or the root; None: no such tree
    num_node_tokens: int  # how far the full pages reach into it


def longest_match(root: RadixNode, tokens: Int32Array) -> Match:
    """One index look-up and one compare for each run of nodes on the path."""
    page, node, num_inside, pos = root.run.page_size, root, 0, 0
    partial: Partial | None = None
    parts: list[Int32Array] = []
    while num_inside == node.num_tokens and len(tokens) - pos >= page:
        child = node.children.get(tokens[pos : pos + page].tobytes())
        if child is None:
            break
        run, first = child.run, child.offset
        common = common_prefix(run.tokens[first : run.num_tokens], tokens[pos:])
        node, num_matched = descend(child, common)
        num_inside = num_matched - num_matched % page
        stop = node.offset + num_inside
        parts.append(run.pages[first // page : stop // page])
        pos += stop - first
        partial = _partial_inside(node, num_inside, num_matched)
    if num_inside == node.num_tokens:
        partial = _partial_below(node, tokens[pos : pos + page])
    num_tokens = pos + (partial.num_tokens if partial is not None else 0)
    return Match(num_tokens, joined(parts), partial, node, num_inside)


def _partial_inside(node: RadixNode, num_inside: int, num_matched: int) -> Partial | None:
    """The match goes on in the page of `node` that follows its last full match."""
    if num_matched == num_inside:
        return None
    page = int(node.pages[num_inside // node.run.page_size])
    return Partial(page, num_matched - num_inside, node)


def _partial_below(node: RadixNode, tokens: Int32Array) -> Partial | None:
    """Longest match of less than a page among the children."""
    if node.run.page_size == 1 or not len(tokens):
        return None
    found = node.children.longest_match(tokens.tobytes())
    if found is None:
        return None
    child, num_tokens = found
    return Partial(int(child.pages[0]), num_tokens, child)


def descend(child: RadixNode, num_common: int) -> tuple[RadixNode, int]:
    """Where a match of `num_common` tokens from the start of `child` on ends, within its run."""
    while child.next is not None and num_common - child.num_tokens >= child.run.page_size:
        num_common -= child.num_tokens
        child = child.next
    return child, min(num_common, child.num_tokens)
