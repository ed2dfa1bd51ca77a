"""Where the results of the report come from: machine, versions, commits, texts; and what to be wary of in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

Documents = Mapping[str, dict[str, Any]]
"""The results of a report by the name of their scenario."""

UNKNOWN = "unknown"
_CORPORA = {
    "mixed": "passages of 3 to 450 words in shares by length as a store of notes, passages and a few long documents "
    "has; long-tailed, with a WordPiece vocabulary a median near 41 and a mean near 77 tokens",
    "short": "of few words, as typed into a search box",
    "long": "each longer than the model takes, so cut at its longest input",
    "all-256": "each cut to 256 tokens",
    "all-512": "each cut to 512 tokens, or to the model's longest input where that is shorter",
}


def commit(document: Mapping[str, Any]) -> str:
    """The commit that a result was measured at, with `-dirty` where files differed from it."""
    return str(document["machine"].get("revision") or UNKNOWN)


def by_commit(documents: Documents) -> dict[str, list[str]]:
    """The scenarios of each commit, the commit of the newest result first."""
    found: dict[str, list[str]] = {}
    for name in sorted(documents, key=lambda name: str(documents[name]["date"]), reverse=True):
        found.setdefault(commit(documents[name]), []).append(name)
    return found


def warnings(documents: Documents) -> list[str]:
    """What a reader must know before comparing results with each other, a sentence each."""
    commits, found = by_commit(documents), []
    if len(commits) > 1:
        found.append(
            f"The results come from {len(commits)} commits, so figures of two scenarios are not of one program: "
            + "; ".join(f"{each}: {', '.join(sorted(names))}" for each, names in commits.items())
            + "."
        )
    if dirty := [name for name in documents if commit(documents[name]).endswith("-dirty")]:
        found.append(
            f"Measured in a working tree with changes that no commit has: {', '.join(sorted(dirty))}. "
            "Nobody can check them out again."
        )
    if unknown := [name for name in documents if commit(documents[name]) == UNKNOWN]:
        found.append(f"Measured before results named their commit: {', '.join(sorted(unknown))}.")
    moved = [
        name
        for name, document in documents.items()
        if document["machine"].get("run_began_at", commit(document)) != commit(document)
    ]
    if moved:
        found.append(f"The commit changed while `bench all` ran: {', '.join(sorted(moved))}.")
    machines = {_machine(document) for document in documents.values()}
    if len(machines) > 1:
        found.append(f"The results come from {len(machines)} machines: {'; '.join(sorted(machines))}.")
    if mixed := _mixed_versions(documents):
        found.append(f"Packages have more than one version in the results: {'; '.join(mixed)}.")
    if ended := [name for name, document in documents.items() if "incomplete" in document["facts"]]:
        found.append(f"Ended early, so not all was measured: {', '.join(sorted(ended))}.")
    return found


def _machine(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    return f"{machine['cores']} cores, {machine['cpu']}, {machine['memory_gib']} GiB"


def _mixed_versions(documents: Documents) -> list[str]:
    found: dict[str, set[str]] = {}
    for document in documents.values():
        for package, version in document["machine"]["versions"].items():
            found.setdefault(package, set()).add(version)
    return [f"{package} {', '.join(sorted(of))}" for package, of in sorted(found.items()) if len(of) > 1]


def head(documents: Documents) -> Iterator[tuple[str, str]]:
    """The machine, the versions and the commits, as names and texts."""
    newest = max(documents.values(), key=lambda document: str(document["date"]))
    machine = newest["machine"]
    yield "machine", f"{_machine(newest)} of memory, {machine['system']}"
    yield "instruction sets", ", ".join(machine["instruction_sets"]) or "none of note"
    yield "Python", str(machine["python"])
    yield "packages", ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    dates = sorted({str(document["date"]) for document in documents.values()})
    yield "measured", dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    commits = by_commit(documents)
    yield "commits", ", ".join(f"{each} ({len(names)})" for each, names in commits.items()) + " (results of each)"


def whole_run(run: Mapping[str, Any] | None) -> str:
    """What the newest `bench all` did, as a sentence."""
    if run is None:
        return "The scenarios were run one by one, not by one run of `bench all`."
    ended = [name for name, status in run["statuses"].items() if status]
    sentence = f"The newest run of `bench all`, of {run['date']}, began at commit {run['began_at'] or UNKNOWN}"
    sentence += f" with {' '.join(run['options']) or 'no options'}."
    if ended:
        sentence += f" Ended with an error: {', '.join(ended)}."
    if run["skipped"]:
        sentence += " Left out: " + "; ".join(f"{name}: {why}" for name, why in run["skipped"].items()) + "."
    return sentence


def texts(documents: Documents) -> Iterator[str]:
    """HTML that describes the texts: where they come from, and each corpus with its sizes in the results."""
    yield (
        "<p>All texts are English prose that every machine with Python has, so nothing is downloaded: the docstrings "
        "of the standard library's modules, classes and functions, and the licences of the installed packages, whole "
        "and by paragraph, cut at 450 words (<code>bench/corpus.py</code>). They are chosen by seeded generators: the "
        "same installation gives the same texts, and the digest in a result shows whether two runs had the same ones. "
        "Rates count real tokens, special tokens included and padding never.</p>"
    )
    yield "<ul>"
    for corpus in _corpora_of(documents):
        sizes = "; ".join(
            f"{escape(name)}: {escape(str(document['facts'][corpus]))}"
            for name, document in documents.items()
            if name.startswith("peers") and corpus in document["facts"]
        )
        yield f"<li><b>{escape(corpus)}</b>: {_CORPORA[corpus]}. <span class='note'>{sizes}.</span></li>"
    yield (
        "<li><b>queries</b> of single calls: docstrings and paragraphs of 4 to 14 words. <b>mixed bulk</b> beside them "
        "and in <code>servers</code>: the mixed corpus, there without texts that MiniLM would cut.</li></ul>"
    )


def _corpora_of(documents: Documents) -> Sequence[str]:
    return [
        corpus
        for corpus in _CORPORA
        if any(corpus in document["facts"] for name, document in documents.items() if name.startswith("peers"))
    ]
