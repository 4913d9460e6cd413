"""What pods mount: volumes of hosts or NFS, claims, buckets, secrets; as core/v1 describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spmd.errors import LaunchError
from spmd.scripts.jobs.job import check_dns_label

Kind = Literal["volume", "claim", "bucket", "secret"]
KINDS: dict[Kind, str] = {
    "volume": "a folder of the node (/FOLDER=PATH) or of an NFS server (SERVER:/FOLDER=PATH)",
    "claim": "a persistent volume claim, and where it is mounted",
    "bucket": "a bucket of Cloud Storage, through GKE's FUSE driver",
    "secret": "a secret, whose keys become files",
}
"""Kind -> what its flag mounts."""

BUCKET_ANNOTATIONS = {"gke-gcsfuse/volumes": "true"}
"""Of pods that mount a bucket: GKE adds the driver's container to them."""

READ_ONLY = ":ro"


@dataclass(frozen=True)
class Volume:
    """One thing that is mounted."""

    kind: Kind  # what it is
    source: str  # its name; of a volume the folder, with its server before it on NFS
    path: str  # where it is mounted
    read_only: bool = False  # whether it is mounted for reading alone

    @classmethod
    def parse(cls, kind: Kind, text: str) -> Volume:
        """Parses `NAME=PATH`, with `:ro` behind it for reading alone.

        Raises:
          LaunchError: not of that form, or a name that Kubernetes does not take.
        """
        source, _, place = text.partition("=")
        path = place.removesuffix(READ_ONLY)
        if not source or not path.startswith("/"):
            raise LaunchError(
                f"--{kind} {text!r} is not of the form NAME=PATH[{READ_ONLY}]",
                required="an absolute PATH",
                fix=f"as in --{kind} {'/data' if kind == 'volume' else 'data'}=/data{READ_ONLY}",
            )
        if kind == "volume" and "/" not in source:
            raise LaunchError(
                f"--volume {text!r}: {source!r} is neither /FOLDER nor SERVER:/FOLDER"
            )
        if kind == "claim":
            check_dns_label("--claim", source)
        return cls(kind, source, path, path != place or kind == "secret")

    def source_fields(self) -> dict[str, Any]:
        """Where it comes from."""
        read_only: dict[str, Any] = {"readOnly": True} if self.read_only else {}
        if self.kind == "claim":
            return {"persistentVolumeClaim": {"claimName": self.source, **read_only}}
        if self.kind == "secret":
            return {"secret": {"secretName": self.source}}
        if self.kind == "bucket":
            about = {"bucketName": self.source}
            return {
                "csi": {
                    "driver": "gcsfuse.csi.storage.gke.io",
                    "volumeAttributes": about,
                    **read_only,
                }
            }
        server, colon, folder = self.source.partition(":")
        if colon:
            return {"nfs": {"server": server, "path": folder, **read_only}}
        return {"hostPath": {"path": self.source}}


def mounted(volumes: Sequence[Volume]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(volumes of a pod, where its container mounts them).

    Raises:
      LaunchError: two at one path.
    """
    paths = [volume.path for volume in volumes]
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise LaunchError(f"two volumes are mounted at {twice[0]}", fix="give each its own path")
    sources, mounts = [], []
    for number, volume in enumerate(volumes):
        name = volume.source if volume.kind == "claim" else f"{volume.kind}-{number}"
        read_only: dict[str, Any] = {"readOnly": True} if volume.read_only else {}
        sources.append({"name": name, **volume.source_fields()})
        mounts.append({"name": name, "mountPath": volume.path, **read_only})
    return sources, mounts
