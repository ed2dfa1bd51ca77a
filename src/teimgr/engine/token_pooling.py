"""Token pooling: replaces similar vectors of a document's tokens by their mean, to store fewer.

The same as `HierarchicalTokenPooling` of sentence-transformers by default, and as PyLate except for the last norm. The
first vector is unchanged. The others are clustered by Ward's criterion on 1 - cosine into 1 / `factor` of their number,
and each cluster becomes its mean, scaled to length 1. colpali-engine clusters rows of the matrix of distances instead,
with other clusters.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.job import Job, Picture
from teimgr.errors import InvalidInput
from teimgr.spec import LoadedModel

Floats = NDArray[np.float32]

MAX_TOKENS = 4096
"""The most tokens of a pooled document: its distances take 128 MiB, and clustering part of a second."""
_KEPT = 1  # vectors kept at the beginning, usually [CLS]


def pool_documents(job: Job, model: LoadedModel, check: Callable[[], None]) -> None:
    """Pool the vectors of a finished job's documents; queries stay as they are. `check` is called before each.

    A document of too many tokens fails alone.
    """
    role = job.options.prompt_name or model.default_prompt_name or "document"
    for row, vectors in enumerate(job.multi_vectors):
        if vectors is None or (role == "query" and not isinstance(job.inputs[row], Picture)):
            continue
        check()
        if len(vectors) > MAX_TOKENS:
            job.multi_vectors[row] = None
            job.errors[row] = InvalidInput(
                f"Input validation error: `pool_factor` is for documents of at most {MAX_TOKENS} tokens, and this one "
                f"has {len(vectors)}: send it in parts, or without `pool_factor`"
            )
        else:
            job.multi_vectors[row] = pooled(vectors, job.options.pool_factor)


def pooled(vectors: Floats, factor: float) -> Floats:
    """The vectors [tokens, width] of a document, with all but the first merged into a part of them: 1 / `factor`."""
    others = vectors[_KEPT:]
    clusters = max(int(len(others) // factor), 1)
    if clusters < len(others):
        labels = _labels(*_merges(_distances(others)), clusters)
        count = int(labels.max()) + 1
        sums = np.zeros((count, vectors.shape[1]), np.float32)
        np.add.at(sums, labels, others)
        means = sums / np.bincount(labels, minlength=count).astype(np.float32)[:, None]
        vectors = np.concatenate([vectors[:_KEPT], means])
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)


def _distances(vectors: Floats) -> NDArray[np.float64]:
    """1 - cosine of all pairs, infinity with itself."""
    found: NDArray[np.float64] = np.triu(np.clip(1 - vectors @ vectors.T, 0, 2).astype(np.float64), 1)
    found += found.T  # exactly symmetric: both halves of the matrix are read
    np.fill_diagonal(found, np.inf)
    return found


def _merges(distances: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The merges of Ward's clustering by chains of nearest neighbours, the lowest first: pairs of members of the two
    clusters, and heights. `distances` is overwritten.
    """
    count = len(distances)
    sizes = np.ones(count)
    pairs, heights = np.empty((count - 1, 2), np.intp), np.empty(count - 1)
    chain: list[int] = []
    first = 0  # clusters before it are merged
    for at in range(count - 1):
        if not chain:
            while not sizes[first]:
                first += 1
            chain.append(first)
        while True:
            here = chain[-1]
            near = int(distances[here].argmin())
            if len(chain) > 1 and distances[here, chain[-2]] <= distances[here, near]:
                near = chain[-2]  # also on ties, so that every chain ends
                break
            chain.append(near)
        del chain[-2:]
        low, high = min(here, near), max(here, near)
        height = distances[low, high]
        pairs[at], heights[at] = (low, high), height
        total = sizes + sizes[low] + sizes[high]
        squares = (sizes + sizes[low]) * distances[low] ** 2 + (sizes + sizes[high]) * distances[high] ** 2
        row = np.sqrt((squares - sizes * height**2) / total)
        row[high] = row[low] = np.inf
        distances[high], distances[:, high] = row, row
        distances[low], distances[:, low] = np.inf, np.inf
        sizes[high] += sizes[low]
        sizes[low] = 0
    order = np.argsort(heights, kind="stable")
    return pairs[order], heights[order]


def _labels(pairs: NDArray[np.intp], heights: NDArray[np.float64], clusters: int) -> NDArray[np.intp]:
    """The cluster of each vector, of at most `clusters`, numbered as scipy's `fcluster` numbers them: from the root of
    the tree, the smaller number of a merge first, single vectors behind the clusters that their neighbour branches to.
    """
    count = len(pairs) + 1
    cut = heights[count - clusters - 1]
    tree = _tree(pairs)
    labels = np.empty(count, np.intp)
    found = 0
    waiting: list[tuple[int, bool]] = [(2 * count - 2, False)]
    while waiting:
        node, is_seen = waiting.pop()
        left, right = tree[node - count]
        if heights[node - count] <= cut:
            labels[_leaves(tree, node)] = found
            found += 1
        elif not is_seen:
            waiting.append((node, True))
            waiting += [(child, False) for child in (right, left) if child >= count]
        else:
            for child in (left, right):
                if child < count:
                    labels[child] = found
                    found += 1
    return labels


def _tree(pairs: NDArray[np.intp]) -> list[tuple[int, int]]:
    """The two children of each merge: below the count of vectors a vector, else a merge before it."""
    count = len(pairs) + 1
    parents = list(range(2 * count - 1))

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    tree: list[tuple[int, int]] = []
    for at, (first, second) in enumerate(pairs.tolist()):
        left, right = sorted((root(first), root(second)))
        parents[left] = parents[right] = count + at
        tree.append((left, right))
    return tree


def _leaves(tree: list[tuple[int, int]], node: int) -> list[int]:
    count, found, waiting = len(tree) + 1, [], [node]
    while waiting:
        one = waiting.pop()
        if one < count:
            found.append(one)
        else:
            waiting += tree[one - count]
    return found
