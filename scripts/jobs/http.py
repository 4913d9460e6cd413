"""What Kubernetes has to know of a program that serves HTTP from process 0: probes and a Service.

The pods of a job are alike, but only process 0 listens: the probes of the others always succeed.
"""

from __future__ import annotations

from typing import Any

from scripts.jobs.job import Job

PORT_NAME = "http"

STARTUP_SECONDS = 3600
"""Until then a model has to be loaded."""

LEAVING_SECONDS = 10
"""Before SIGTERM: meanwhile process 0 is taken out of the Service, so that nobody is refused."""

_PROBE = (
    "import os, urllib.request as r; "
    "os.environ['JOB_COMPLETION_INDEX'] == os.environ.get('MEGASCALE_SLICE_ID', '0') == '0' "
    "and r.urlopen('http://localhost:{port}{path}', timeout=5)"
)


def container_fields(port: int) -> dict[str, Any]:
    """Fields of the container of every pod."""

    def probe(path: str, period: int, failures: int) -> dict[str, Any]:
        program = _PROBE.format(port=port, path=path)
        return {
            "exec": {"command": ["python3", "-c", program]},
            "periodSeconds": period,
            "timeoutSeconds": 10,
            "failureThreshold": failures,
        }

    return {
        "startupProbe": probe("/startupz", 10, STARTUP_SECONDS // 10),
        "livenessProbe": probe("/livez", 20, 3),
        "readinessProbe": probe("/readyz", 10, 1),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVING_SECONDS)]}}},
    }


def service_object(job: Job, namespace: str | None, port: int) -> dict[str, Any]:
    """A Service whose only pod is process 0's."""
    metadata = {"name": f"{job.name}-{PORT_NAME}", "namespace": namespace}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {name: value for name, value in metadata.items() if value},
        "spec": {
            "selector": {
                "jobset.sigs.k8s.io/jobset-name": job.name,
                "jobset.sigs.k8s.io/job-index": "0",
                "batch.kubernetes.io/job-completion-index": "0",
            },
            "ports": [{"name": PORT_NAME, "port": 80, "targetPort": port}],
        },
    }
