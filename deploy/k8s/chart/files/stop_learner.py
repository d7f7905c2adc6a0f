"""Suspend the learner's Jobs of a release, but the one that it is to run, and wait for their pods.

    stop_learner.py NAMESPACE RELEASE JOB

A hook of the chart runs it before an upgrade, in a pod that may list and change Jobs. A suspended
Job asks its pods to end, and the learner then writes a checkpoint. If JOB is the one that runs,
nothing is done.
"""

from __future__ import annotations

import json
import ssl
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SERVER = "https://kubernetes.default.svc"
REQUEST_TIMEOUT_S = 30.0
LOOK_S = 1.0


def ask(path: str, *, patch: dict[str, Any] | None = None, **query: str) -> dict[str, Any]:
    """Send one request to the cluster; return its answer."""
    request = urllib.request.Request(
        f"{SERVER}{path}?{urllib.parse.urlencode(query)}",
        None if patch is None else json.dumps(patch).encode(),
        {
            "authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
            "content-type": "application/merge-patch+json",
        },
        method="GET" if patch is None else "PATCH",
    )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S, context=context) as answer:
        return json.load(answer)


def main(namespace: str, release: str, kept: str) -> None:
    """Suspend all Jobs of the learner but one; return when their pods have ended."""
    jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    selector = f"app.kubernetes.io/instance={release},app.kubernetes.io/component=learner"
    found = ask(jobs, labelSelector=selector)["items"]
    for name in (job["metadata"]["name"] for job in found):
        if name == kept:
            print(f"{name} stays as it is")
            continue
        print(f"{name} is asked to write a checkpoint and to end", flush=True)
        ask(f"{jobs}/{name}", patch={"spec": {"suspend": True}})
        pods = f"/api/v1/namespaces/{namespace}/pods"
        while any(
            pod["status"].get("phase") not in ("Succeeded", "Failed")
            for pod in ask(pods, labelSelector=f"batch.kubernetes.io/job-name={name}")["items"]
        ):
            time.sleep(LOOK_S)
        print(f"{name} has ended")


if __name__ == "__main__":
    main(*sys.argv[1:])
