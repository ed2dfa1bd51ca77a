"""Two pages about errors: the table of codes with their statuses, and causes and remedies of each."""

from __future__ import annotations

from grpc import StatusCode

from docsite.markdown import MADE_BY, code, document, table
from teimgr.cli.failures import exit_status
from teimgr.errors import Code, error_from_code
from teimgr.observability.troubleshooting import ADVICE, meaning, repetition
from teimgr.wire.status import CODE_KEY, PUSHBACK_KEY, STATUS, TRY_AGAIN

_GRPC_NAMES = {kind.value[0]: kind.name for kind in StatusCode}
_REFERENCE_HEAD = f"""# Errors

{MADE_BY}

Every failure has one of these codes; a code is never renamed. Causes and remedies are in
[troubleshooting](../troubleshooting.md), and in a terminal by `teimgr explain CODE`.

* **REST** (`/instances`, `/models`, `/config`, …): `{{"error": sentence, "code": CODE, "timestamp": time}}`,
  and a header `Link` to the code at `/docs/errors` of the daemon.
* **Inference over HTTP**: the error body of the dialect that was called, in its words. `error_type` below is TEI's.
* **gRPC**: the status below, and the code in the trailing metadata `{CODE_KEY}`.
* **Command line**: the cause after `why:`, with `--json` `error.code`; the exit status below.

Answers 429 and 503 have `Retry-After`, and their gRPC statuses `{PUSHBACK_KEY}`: whole seconds and milliseconds after
which to try again, unless that depends on an operator; answers of REST have it where the time is known. Dialects other
than TEI's have neither 422 nor 424: there an input that breaks a rule is 400, and a failed inference 500.
REST answers `NOT_FOUND`, `METHOD_NOT_ALLOWED` and `UNSUPPORTED_MEDIA_TYPE` to requests that no route takes.
"""
_TROUBLE_HEAD = f"""# Troubleshooting by error code

{MADE_BY}

`teimgr explain CODE` shows the same in a terminal, `/docs/errors` of the daemon in a browser;
error replies of REST link there (header `Link`).

Where to find the code of a failure: `code` in a reply of REST, `{CODE_KEY}` in the trailing metadata of gRPC, `why:` on
the command line. [Errors](reference/errors.md) has the statuses. Without a code at hand, begin with these:

* `teimgr doctor` checks the host (ports, folders, limits, torch, GPUs, the hub cache) and the daemon that runs: its
  alarms, failing instances, disks, certificate, clock and version. With `--bundle FILE` it writes what a report needs.
* `teimgr ps` shows the state of each instance, with the reason where it failed; `teimgr logs NAME` has its log.
* `/health` lists alarms, the [page](page.md) shows them.
* An instance stays `starting`: it downloads or loads its model; `teimgr logs NAME -f` follows it.
* An instance restarts again and again: `GET /instances/{{name}}/events` has the exits, and names the crash report.
* Prometheus shows `exported_instance`: set `honor_labels: true` ([metrics](metrics.md)).
"""


def reference() -> str:
    """The text of docs/reference/errors.md."""
    rows = []
    for each in Code:
        mapping = STATUS[each]
        http = f"{mapping.http}{', Retry-After' if mapping.http in TRY_AGAIN else ''}"
        status = int(exit_status(error_from_code(each, "")))
        link = f"[{code(each.name)}](../troubleshooting.md#{each.name.lower()})"
        rows.append((link, http, code(_GRPC_NAMES[mapping.grpc]), mapping.tei, str(status), meaning(each)))
    headings = ("code", "HTTP", "gRPC", "`error_type`", "exit", "meaning")
    return document([*_REFERENCE_HEAD.splitlines(), "", *table(headings, rows)])


def troubleshooting() -> str:
    """The text of docs/troubleshooting.md: a heading, and so an anchor, for each code."""
    lines = _TROUBLE_HEAD.splitlines()
    for each in sorted(Code, key=lambda one: one.name):
        advice = ADVICE[each]
        lines += ["", f"## {each.name}", "", f"{meaning(each)} {repetition(each)}"]
        for title, sentences in (("Causes", advice.causes), ("Remedies", advice.remedies)):
            lines += ["", f"**{title}**", "", *(f"* {sentence}" for sentence in sentences)]
    return document(lines)
